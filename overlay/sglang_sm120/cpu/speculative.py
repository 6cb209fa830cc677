"""What DFlash and DDTree need on the CPU engine beside the plain path and its ops: a draft attention backend."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

DRAFT_BACKEND_NAME = "torch_native_draft"


def register() -> None:
    """Called on a CPU engine only, before the server arguments are read."""
    from sglang.srt.arg_groups import choices, speculative_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_draft_attention_backend_choices([DRAFT_BACKEND_NAME])
    register_attention_backend(DRAFT_BACKEND_NAME)(_create_draft_backend)
    speculative_hook.current_platform = _CpuPlatform(speculative_hook.current_platform)
    setattr(Tensor, "record_stream", _without_cpu(Tensor.record_stream))  # noqa: B010 -- a method, to a type checker


def _without_cpu(record_stream: Callable[[Tensor, Any], None]) -> Callable[[Tensor, Any], None]:
    """Memory of the CPU is not given back by stream, and torch refuses to record it."""

    def record(tensor: Tensor, stream: Any) -> None:
        if not tensor.is_cpu:
            record_stream(tensor, stream)

    return record


class _CpuPlatform:
    """Upstream's platform, which also grants DFLASH: upstream's own list of devices leaves the CPU out."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return True

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "DFLASH"

    def supports_speculative_draft_attention_backend(self, _algorithm: str, backend: str) -> bool:
        return backend == DRAFT_BACKEND_NAME

    def get_default_speculative_draft_attention_backend(self, _algorithm: str) -> str:
        return DRAFT_BACKEND_NAME


def _create_draft_backend(model_runner: Any) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import allocation

    # Upstream picks by the target backend's name, and knows that `torch_native` alone runs without Triton.
    allocation.get_last_loc_triton = allocation.get_last_loc_torch

    class TorchNativeDraftBackend(TorchNativeAttnBackend):
        """`torch_native` that also takes a draft block: a verify batch, whose rows are the tokens after `seq_lens`."""

        def forward_extend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: ForwardBatch, **kwargs: Any
        ) -> Tensor:
            if batch.forward_mode.is_target_verify():
                batch = _as_extend(batch)
            return super().forward_extend(q, k, v, layer, batch, **kwargs)

    # Upstream's runner hands over input embeddings in bf16 whatever the model's dtype is.
    model_runner.model.layers[0].register_forward_pre_hook(_in_dtype(model_runner.dtype))
    for layer in model_runner.model.layers:
        layer.self_attn.use_table_qk_norm_rope = False  # a GPU kernel
    return TorchNativeDraftBackend(model_runner)


def _in_dtype(dtype: torch.dtype) -> Callable[[torch.nn.Module, tuple], tuple]:
    """Pre-forward hook of a draft layer: its hidden states, the second argument, in `dtype`."""
    return lambda _layer, args: (args[0], args[1].to(dtype), *args[2:])


def _as_extend(batch: ForwardBatch) -> ForwardBatch:
    view = copy.copy(batch)
    width = batch.spec_info.draft_token_num
    view.extend_prefix_lens = batch.seq_lens
    view.extend_seq_lens = torch.full_like(batch.seq_lens, width)
    view.seq_lens = batch.seq_lens + width
    return view

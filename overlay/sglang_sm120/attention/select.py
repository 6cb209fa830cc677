"""When SGLang uses `sm120_mla`: by itself on sm_120 / sm_121 for MLA models, elsewhere by flag; what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from sglang_sm120 import ops
from sglang_sm120.attention import BACKEND_NAME
from sglang_sm120.attention.reference import LATENT_DIM, ROPE_DIM

AUTO_CAPABILITIES = ((12, 0), (12, 1))
# Their draft attends with the target's backend where no other is named.
DRAFTS_LIKE_TARGET = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
# What the built kernels run on; bulk copies on 9.0 and 12.x, plain asynchronous copies on 8.x.
KERNEL_MAJORS = (8, 9, 12)


def is_auto_device() -> bool:
    """Whether the first GPU is one that gets `sm120_mla` without being asked."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in AUTO_CAPABILITIES


def default_backend(original: Callable[..., str], server_args: Any, use_mla_backend: bool, model_config: Any) -> str:
    """Around upstream's default: an MLA model that we can serve on sm_120 / sm_121 gets our backend."""
    if use_mla_backend and is_auto_device() and not refusals(server_args, model_config):
        return BACKEND_NAME
    return original(server_args, use_mla_backend, model_config)


def reason(server_args: Any, model_config: Any, chosen: str) -> str:
    """Why `chosen` attends in this server; `server_args` as the user gave them."""
    asked = (server_args.attention_backend, server_args.prefill_attention_backend, server_args.decode_attention_backend)
    if any(asked):
        return "asked for"
    if chosen == BACKEND_NAME:
        return "the default for MLA on sm_120 and sm_121"
    why_not = refusals(server_args, model_config) if is_auto_device() else []
    return "; ".join(["upstream's default", *why_not])


def refusals(server_args: Any, model_config: Any) -> list[str]:
    """Why this configuration cannot run on `sm120_mla`, each naming the flag or the model property; empty if it can."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    cfg = server_args
    found = []
    latent = getattr(model_config, "kv_lora_rank", None), getattr(model_config, "qk_rope_head_dim", None)
    if latent != (LATENT_DIM, ROPE_DIM):
        has = "no MLA latent" if latent[0] is None else f"an MLA latent of {latent[0]} + {latent[1]}"
        found.append(
            f"the model has {has}, the backend serves {LATENT_DIM} + {ROPE_DIM} (DeepSeek, Kimi, GLM): choose another"
        )
    if getattr(model_config.hf_config, "index_topk", None):
        found.append("the model uses sparse attention (DSA): choose --attention-backend dsa")
    if getattr(model_config, "sliding_window_size", None):
        found.append("the model uses sliding-window attention, which has no tree mask by depth here")
    if getattr(model_config.hf_config, "llama_4_scaling", None):
        found.append("the model scales queries by position (llama_4_scaling), which upstream does for triton only")
    if mambaish_config(model_config) is not None:
        found.append("the model mixes in linear attention (as Kimi-Linear does), which never ran beside this backend")
    if cfg.attn_cp_size > 1:
        found.append(f"--attn-cp-size {cfg.attn_cp_size}: prefill context parallelism is not supported, use 1")
    if cfg.dcp_size > 1:
        found.append(f"--dcp-size {cfg.dcp_size}: decode context parallelism is not supported, use --dcp-size 1")
    if cfg.enable_unified_memory:
        found.append("--enable-unified-memory: the kernels read physical slots only, leave the flag out")
    if cfg.enable_deterministic_inference:
        found.append("--enable-deterministic-inference: the context splits depend on the batch, choose triton or fa3")
    if cfg.kv_cache_dtype not in ("auto", "bfloat16", "bf16", "fp8_e4m3"):
        found.append(f"--kv-cache-dtype {cfg.kv_cache_dtype}: use auto, bfloat16 or fp8_e4m3")
    if cfg.flashinfer_mla_disable_ragged:
        found.append("--flashinfer-mla-disable-ragged: prompts here need FlashInfer's ragged kernels, leave it out")
    found += _speculation_refusals(cfg)
    return found + (_gpu_refusals(model_config) if torch.cuda.is_available() and cfg.device != "cpu" else [])


def _speculation_refusals(cfg: Any) -> list[str]:
    """Trees that do not come as words, and drafts that would attend with our backend, which has no draft side."""
    name = (cfg.speculative_algorithm or "").upper()
    if name in ("NGRAM", "UNO"):
        return [f"--speculative-algorithm {name}: its trees were never verified by the backend, choose triton"]
    if name in DRAFTS_LIKE_TARGET and cfg.speculative_draft_attention_backend in (None, BACKEND_NAME):
        return [f"--speculative-algorithm {name}: the draft needs --speculative-draft-attention-backend triton"]
    return []


def _gpu_refusals(model_config: Any) -> list[str]:
    found = []
    major, minor = torch.cuda.get_device_capability()
    if major not in KERNEL_MAJORS:
        found.append(f"the GPU is sm_{major}{minor}, the kernels run on sm_80 to sm_90, sm_120 and sm_121")
    if model_config.dtype != torch.bfloat16:
        found.append(f"--dtype {model_config.dtype}: the kernels take bfloat16 queries, use --dtype bfloat16")
    if not ops.LIBRARY_PATH.exists():
        found.append("this wheel was built without kernels: build it where nvcc is found, or choose triton")
    return found


def check_resolved(_result: None, server_args: Any) -> None:
    """After upstream resolved its arguments: refuse at start what `sm120_mla` was asked for and cannot serve.

    Raises ValueError naming every reason.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    view = resolved_view(server_args)
    if BACKEND_NAME not in attention_backends_of(view):
        return
    reasons = refusals(view, model_config_of(server_args))
    if reasons:
        raise ValueError(f"--attention-backend {BACKEND_NAME} cannot serve this: " + "; ".join(reasons))


def leave_prompts_uncaptured(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Around upstream's step of this purpose for another backend: no prefill CUDA graphs unless they are asked for.

    Inside one, a chunk of up to 8,192 tokens takes the absorbed path, which costs more than full heads.
    """
    from sglang.srt.arg_groups.overrides import attention_backends_of, declare_resolution, resolved_view, resolving_view
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    previous(server_args)
    graphs = resolving_view(server_args).cuda_graph_config
    asked = (Phase.PREFILL, "backend") in server_args._cuda_graph_config_locked
    ours = attention_backends_of(resolved_view(server_args))[0] == BACKEND_NAME
    if ours and prefills_with_full_heads() and not asked and graphs.prefill.backend != Backend.DISABLED:
        without = with_phase(graphs, Phase.PREFILL, backend=Backend.DISABLED)
        declare_resolution(server_args, leave_prompts_uncaptured.__name__, cuda_graph_config=without)


@lru_cache(maxsize=1)
def prefills_with_full_heads() -> bool:
    """Whether prompts go to FlashInfer with full heads (a GPU that has it) instead of the absorbed path."""
    from sglang.srt.utils import is_flashinfer_available

    return torch.cuda.is_available() and is_flashinfer_available()

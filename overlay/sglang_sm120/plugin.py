"""Entry point `sglang.srt.plugins`: tells SGLang about our parts. Runs in every process before the engine starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_sm120 import kvdefrag, requests, sessions
from sglang_sm120.attention import BACKEND_NAME

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


def register() -> None:
    """Register the backend, its CLI choice, its places in upstream's per-backend lists, and when it is chosen."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_attention_backend_choices([BACKEND_NAME])
    choices.add_chunked_prefix_cache_attention_backend(BACKEND_NAME)
    register_attention_backend(BACKEND_NAME)(_create_backend)
    _register_mla_dispatch()
    _register_dflash_verify()
    _register_selection()
    _register_evidence()
    _register_speculation()
    _register_cpu_engine()
    kvdefrag.register()
    requests.register()
    sessions.register()


def _register_speculation() -> None:
    from sglang_sm120.ddtree import algorithm

    algorithm.register()


def _register_cpu_engine() -> None:
    from sglang_sm120.cpu import capture, speculative, standin

    if standin.is_installed():
        capture.register()
        speculative.register()


def _create_backend(model_runner: ModelRunner) -> AttentionBackend:
    from sglang_sm120.attention import select
    from sglang_sm120.attention.backend import Sm120MLABackend

    select.refuse_scaled_kv(model_runner)
    return Sm120MLABackend(model_runner)


def _register_mla_dispatch() -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils

    def forward_method(attn: Any, forward_batch: Any) -> Any:
        from sglang_sm120.attention.select import prefills_with_full_heads

        if prefills_with_full_heads():
            return handler._handle_attention_backend(attn, forward_batch, BACKEND_NAME)
        return handler._dispatch_mla_subtype(attn, forward_batch)

    handler.AttentionBackendRegistry.register(BACKEND_NAME, forward_method)
    handler.MHA_ONE_SHOT_SUPPORTED_BACKENDS.append(BACKEND_NAME)
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(BACKEND_NAME)


def _register_dflash_verify() -> None:
    """A chain verify is causal in our backend: upstream then builds no context-sized mask for it."""
    from sglang.srt.speculative import dflash_utils

    dflash_utils._DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS |= {"Sm120MLABackend"}


def _register_selection() -> None:
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_sm120.attention import select

    # By this step the attention backend is known and no prefill graph is planned yet.
    step = "disable_prefill_cuda_graph_for_deepseek_trtllm_mla"
    register_resolution_hook(step)(select.leave_prompts_uncaptured)
    HookRegistry.register(
        "sglang.srt.arg_groups.overrides.get_default_attn_backend", select.default_backend, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.server_args.ServerArgs.resolve_once", select.check_resolution, HookType.AROUND)


def _register_evidence() -> None:
    """What tells an operator what runs: fallbacks, verify times, the line at start and the doctor's facts."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_sm120.attention import graphs, metrics, report

    forward = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
    state = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"
    HookRegistry.register(forward, metrics.observe_step, HookType.AROUND)
    HookRegistry.register(forward, graphs.note_fallback, HookType.AFTER)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", report.log_ready, HookType.AFTER)
    HookRegistry.register(f"{state}.get_internal_state", report.add_to_state, HookType.AFTER)

"""Entry point `sglang.srt.plugins`: tells SGLang about the backend. Runs in every process before the engine starts."""

from __future__ import annotations

from sglang_sm120.attention import BACKEND_NAME


def register() -> None:
    """Register the backend, its CLI choice and its places in upstream's per-backend lists."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    choices.add_attention_backend_choices([BACKEND_NAME])
    choices.add_chunked_prefix_cache_attention_backend(BACKEND_NAME)
    register_attention_backend(BACKEND_NAME)(_create_backend)
    _register_mla_dispatch()


def _create_backend(model_runner):
    from sglang_sm120.attention.backend import Sm120MLABackend

    if not model_runner.use_mla_backend:
        raise ValueError(
            f"--attention-backend {BACKEND_NAME} serves MLA models only (DeepSeek, Kimi, GLM with a 512 + 64 latent); "
            "choose another --attention-backend for this model."
        )
    return Sm120MLABackend(model_runner)


def _register_mla_dispatch() -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    from sglang.srt.models.deepseek_common import utils

    handler.AttentionBackendRegistry.register(BACKEND_NAME, handler._dispatch_mla_subtype)
    utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(BACKEND_NAME)

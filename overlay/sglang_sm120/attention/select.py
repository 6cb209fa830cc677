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
# Their verifies were never run on this backend.
NOT_VERIFIED_HERE = ("NGRAM", "UNO", "DSPARK")
# They store latents as they are, whatever scale of KV the checkpoint has.
STORE_UNSCALED = (BACKEND_NAME, "flashinfer")


def is_auto_device() -> bool:
    """Whether the first GPU is one that gets `sm120_mla` without being asked."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in AUTO_CAPABILITIES


def default_backend(original: Callable[..., str], server_args: Any, use_mla_backend: bool, model_config: Any) -> str:
    """Around upstream's default: an MLA model that we can serve on sm_120 / sm_121 gets our backend."""
    if use_mla_backend and is_auto_device() and not refusals(server_args, model_config):
        return BACKEND_NAME
    return original(server_args, use_mla_backend, model_config)


def reason(server_args: Any, model_config: Any, chosen: str) -> str:
    """Why `chosen` attends in this server; `server_args` hold what the user gave, and what became of it."""
    from sglang.srt.arg_groups.overrides import resolved_view

    asked = _asked(server_args)
    if chosen == BACKEND_NAME:
        return "asked for" if BACKEND_NAME in asked else "the default for MLA on sm_120 and sm_121"
    if any(asked):
        return "asked for"
    why_not = refusals(resolved_view(server_args), model_config) if is_auto_device() else []
    return "; ".join(["upstream's default", *why_not])


def _asked(server_args: Any) -> tuple[str | None, ...]:
    """The attention backends that the user named."""
    cfg = server_args
    return cfg.attention_backend, cfg.prefill_attention_backend, cfg.decode_attention_backend


def refusals(server_args: Any, model_config: Any) -> list[str]:
    """Why this configuration cannot run on `sm120_mla`, each naming the flag or the model property; empty if it can."""
    cfg = server_args
    found = _flag_refusals(cfg) + _model_refusals(model_config)
    heads = (model_config.num_attention_heads or 0) * cfg.attn_dp_size // cfg.tp_size  # Mamba has none
    if heads > ops.MAX_HEADS:
        found.append(
            f"--tp-size {cfg.tp_size} leaves {heads} heads a rank, the backend takes {ops.MAX_HEADS}: raise it"
        )
    graphs = cfg.cuda_graph_config
    if graphs is not None and graphs.prefill.backend == "full":
        found.append("--cuda-graph-backend-prefill full: rows of prompts are planned outside the graph, use breakable")
    return found + (_gpu_refusals(model_config) if torch.cuda.is_available() and cfg.device != "cpu" else [])


def _flag_refusals(cfg: Any) -> list[str]:
    """What the flags alone say, resolved or as they were given."""
    found = []
    if cfg.attn_cp_size > 1:
        found.append(f"--attn-cp-size {cfg.attn_cp_size}: prefill context parallelism is not supported, use 1")
    if cfg.dcp_size > 1:
        found.append(f"--dcp-size {cfg.dcp_size}: decode context parallelism is not supported, use --dcp-size 1")
    if cfg.enable_unified_memory:
        found.append("--enable-unified-memory: the kernels read physical slots only, leave the flag out")
    if cfg.enable_deterministic_inference:
        found.append("--enable-deterministic-inference: the context splits depend on the batch, choose triton or fa3")
    if cfg.enable_two_batch_overlap:
        found.append("--enable-two-batch-overlap: prompts over a cached prefix are not planned there, leave it out")
    if cfg.enable_pdmux:
        found.append("--enable-pdmux: prompts and decode on two streams never ran on this backend, leave it out")
    if cfg.kv_cache_dtype not in ("auto", "bfloat16", "bf16", "fp8_e4m3"):
        found.append(f"--kv-cache-dtype {cfg.kv_cache_dtype}: use auto, bfloat16 or fp8_e4m3")
    if cfg.flashinfer_mla_disable_ragged:
        found.append("--flashinfer-mla-disable-ragged: prompts here need FlashInfer's ragged kernels, leave it out")
    name = (cfg.speculative_algorithm or "").upper()
    if name in NOT_VERIFIED_HERE:
        found.append(f"--speculative-algorithm {name}: its verify never ran on this backend, choose triton")
    if name in DRAFTS_LIKE_TARGET and cfg.speculative_draft_attention_backend is None:
        found.append(f"--speculative-algorithm {name}: the draft needs --speculative-draft-attention-backend triton")
    return found


def _model_refusals(model_config: Any) -> list[str]:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = []
    latent = getattr(model_config, "kv_lora_rank", None), getattr(model_config, "qk_rope_head_dim", None)
    if latent != (LATENT_DIM, ROPE_DIM):
        has = "no MLA latent" if latent[0] is None else f"an MLA latent of {latent[0]} + {latent[1]}"
        found.append(
            f"the model has {has}, the backend serves {LATENT_DIM} + {ROPE_DIM} (DeepSeek, Kimi, GLM): choose another"
        )
    text = model_config.hf_text_config  # of a model that also sees, the part that attends here
    if getattr(text, "index_topk", None):
        found.append("the model uses sparse attention (DSA): choose --attention-backend dsa")
    if getattr(model_config, "sliding_window_size", None):
        found.append("the model uses sliding-window attention, which has no tree mask by depth here")
    if getattr(text, "llama_4_scaling", None):
        found.append("the model scales queries by position (llama_4_scaling), which upstream does for triton only")
    if mambaish_config(model_config) is not None:
        found.append("the model mixes in linear attention (as Kimi-Linear does), which never ran beside this backend")
    return found


def _gpu_refusals(model_config: Any) -> list[str]:
    problem = ops.library_problem(torch.cuda.get_device_capability())
    found = [problem] if problem else []
    if model_config.dtype != torch.bfloat16:
        found.append(f"--dtype {model_config.dtype}: the kernels take bfloat16 queries, use --dtype bfloat16")
    return found


def check_resolution(resolve: Callable[[Any], None], server_args: Any) -> None:
    """Around upstream's resolution of its arguments: refuse what `sm120_mla` was asked for and cannot serve.

    Flags come first: of some of them upstream would complain under another name. Raises ValueError naming every reason.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import attention_backends_of, resolved_view

    if server_args.speculative_draft_attention_backend == BACKEND_NAME:
        raise ValueError(
            f"--speculative-draft-attention-backend {BACKEND_NAME}: it serves targets only, choose triton or flashinfer"
        )
    if BACKEND_NAME in _asked(server_args):
        _refuse(_flag_refusals(server_args))
    resolve(server_args)
    view = resolved_view(server_args)
    if BACKEND_NAME in attention_backends_of(view):
        _refuse(refusals(view, model_config_of(server_args)))


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ValueError(f"--attention-backend {BACKEND_NAME} cannot serve this: " + "; ".join(reasons))


def refuse_scaled_kv(model_runner: Any) -> None:
    """Beside another backend, refuse a checkpoint's scale of KV; it is known once the weights are loaded.

    We read latents as they are. Upstream's Triton divides what it writes absorbed by `k_scale`, in a bf16 pool too, but
    not what a prompt writes with full heads: no factor is right for both.
    """
    named = {"prefill": model_runner.prefill_attention_backend_str, "decode": model_runner.decode_attention_backend_str}
    layers = (getattr(module, "k_scale_float", None) for module in model_runner.model.modules())
    scale = next((k_scale for k_scale in layers if k_scale not in (None, 1.0)), None)
    for phase, backend in named.items():
        if scale is not None and backend not in STORE_UNSCALED:
            raise ValueError(
                f"--{phase}-attention-backend {backend} may store KV divided by the k_scale {scale:g} of "
                f"{model_runner.model_config.model_path}, and {BACKEND_NAME} reads it as it is: use {BACKEND_NAME} "
                f"for both phases, or flashinfer"
            )


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

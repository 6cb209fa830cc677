"""`--speculative-algorithm DDTREE` for SGLang: what it is to upstream's branches, and which settings it takes.

Upstream sees a member of the DFlash family (same drafter, draft KV and aux hidden states) whose verify window is wider
than its draft block: `speculative_num_draft_tokens` is the verify width, `speculative_dflash_block_size` the block.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

from sglang_sm120.attention import BACKEND_NAME
from sglang_sm120.ddtree import ALGORITHM_NAME
from sglang_sm120.ddtree.tree import MAX_DEPTH, MAX_TOPK, MAX_WIDTH

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)
DEFAULT_MAX_RUNNING_REQUESTS = 48
# The first is the default. Of upstream's choices trtllm_mha is causal, which a draft block is not inside.
GPU_DRAFT_BACKENDS = ("triton", "flashinfer", "fa3", "fa4")
_LOGPROBS = "managers.scheduler_components.logprob_result_processor"


def _yes(_self: object) -> bool:
    return True


def _no(_self: object) -> bool:
    return False


class DDTreeAlgorithm(CustomSpecAlgo):
    """Answers of DDTREE to upstream's `is_*` and `supports_*` questions: those of DFLASH."""

    is_dflash = is_dflash_family = supports_target_verify_for_draft = _yes
    supports_mixed_chunk = supports_prefill_shared_read_done = supports_grammar_overlap = _yes
    carries_draft_hidden_states = need_topk = _no
    create_future_map = SpeculativeAlgorithm.create_future_map

    def get_num_tokens_per_req_for_target_verify(self, num_draft_tokens: int, is_draft_worker: bool) -> int:
        """Tokens a request in a verify-mode forward: the block for the drafter, the tree for the target."""
        from sglang.srt.runtime_context import get_spec

        return get_spec().speculative_dflash_block_size if is_draft_worker else num_draft_tokens

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Refuse what does not work, then fill in the widths. Raises ValueError naming the flag."""
        refuse_unsupported(server_args)
        fill_in(server_args)


def register() -> None:
    """Make the name known; the worker is imported where it runs."""

    def worker(_server_args: ServerArgs) -> type:
        from sglang_sm120.ddtree.worker import DDTreeWorker

        return DDTreeWorker

    SpeculativeAlgorithm.register(ALGORITHM_NAME, supports_overlap=True, spec_class=DDTreeAlgorithm)(worker)
    for target, hook in {
        "model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.get_spec_info": _capture_trees,
        "mem_cache.allocation_sizing.get_req_to_token_extra_context_len": _widen_rows,
        "speculative.dflash_utils.validate_dflash_request": _refuse_request,
        f"{_LOGPROBS}.SchedulerLogprobResultProcessor.add_logprob_return_values": _forget_log_probability_of_no_token,
    }.items():
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AFTER)


def _is_ddtree() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == ALGORITHM_NAME


def _capture_trees(spec_info: Any, graph_runner: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Capture the target's verify with a tree mask: a replay of what DFLASH captures applies the plain causal one."""
    if spec_info is not None and _is_ddtree() and not graph_runner.model_runner.is_draft_worker:
        from sglang_sm120.ddtree.verify import TreeVerifyInput

        spec_info.__class__ = TreeVerifyInput
    return spec_info


def _widen_rows(extra_tokens: int) -> int:
    """Room of a row past the context, in tokens: at page size 1 upstream leaves less than the 2 windows it reserves."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return max(extra_tokens, get_alloc_reserve_per_decode()) if _is_ddtree() else extra_tokens


def _forget_log_probability_of_no_token(_none: None, _processor: Any, _index: int, req: Any, *_args: Any) -> None:
    """Of a prompt alone plain decoding samples nothing; with a drafter upstream samples, and reports, one token."""
    if req.sampling_params.max_new_tokens == 0 and _is_ddtree():
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()


def _refuse_request(error: str | None, req: Any, _enable_overlap: bool) -> str | None:
    """The message for a request that a tree verify cannot serve as plain decoding would; None takes it."""
    if error is not None or not _is_ddtree():
        return error
    params = req.sampling_params
    refused = {
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
        "watermark": params.watermark is not None,
        "return_sampling_mask": req.return_sampling_mask,
        "return_hidden_states": req.return_hidden_states,
    }
    wanted = [name for name, is_wanted in refused.items() if is_wanted]
    if not wanted:
        return None
    return f"{', '.join(wanted)} does not work with --speculative-algorithm {ALGORITHM_NAME}: leave it out."


# Flag -> (is it a trouble?, what to do instead).
_REFUSALS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "--pp-size": (lambda a: a.pp_size != 1, "use 1: the drafter reads hidden states of layers on one rank"),
    "--attn-cp-size": (lambda a: a.attn_cp_size != 1, "use 1"),
    "--dcp-size": (lambda a: (a.dcp_size or 1) != 1, "use 1: tree masks are not split along the context yet"),
    "--attn-dp-size": (lambda a: (a.attn_dp_size or 1) != 1, "use 1 (no --enable-dp-attention)"),
    "--disaggregation-mode": (lambda a: a.disaggregation_mode != "null", "serve prefill and decode in one server"),
    "--enable-unified-memory": (lambda a: a.enable_unified_memory, "leave it out: it refuses trees"),
    "--enable-hierarchical-cache": (
        lambda a: a.enable_hierarchical_cache,
        "leave it out: KV of trees and drafter never went to the host and back",
    ),
    "--enable-hisparse": (lambda a: a.enable_hisparse, "leave it out: it is for models of sparse attention"),
    "--enable-two-batch-overlap": (lambda a: a.enable_two_batch_overlap, "leave it out"),
    "--enable-pdmux": (lambda a: a.enable_pdmux, "leave it out: it captures a graph for each of its streams"),
    "--enable-lora": (lambda a: a.enable_lora or a.lora_paths, "leave out --enable-lora and --lora-paths"),
    "--enable-return-routed-experts": (lambda a: a.enable_return_routed_experts, "leave it out"),
    "--enable-return-indexer-topk": (lambda a: a.enable_return_indexer_topk, "leave it out"),
    "--kv-canary": (lambda a: a.kv_canary != "none", "leave it out: it takes the path's KV, which moves, for corrupt"),
    "--enable-watermark": (lambda a: a.enable_watermark, "leave it out"),
    "--speculative-use-rejection-sampling": (
        lambda a: a.speculative_use_rejection_sampling,
        "leave it out: the tree walk already follows the target's distribution",
    ),
    "--speculative-accept-threshold-single": (lambda a: a.speculative_accept_threshold_single != 1.0, "use 1.0"),
    "--speculative-accept-threshold-acc": (lambda a: a.speculative_accept_threshold_acc != 1.0, "use 1.0"),
    "--speculative-num-draft-tokens": (
        lambda a: a.speculative_num_draft_tokens is not None,
        "give --speculative-ddtree-budget (nodes of the tree) or --speculative-dflash-block-size (width of the draft)",
    ),
    "--speculative-num-steps": (
        lambda a: a.speculative_num_steps not in (None, 1),
        "leave it out: --speculative-dflash-block-size is how far one draft reaches",
    ),
    "--speculative-eagle-topk": (
        lambda a: a.speculative_eagle_topk not in (None, 1),
        "use --speculative-ddtree-topk",
    ),
    "--speculative-token-map": (
        lambda a: a.speculative_token_map is not None,
        "leave it out: the drafter proposes from the target's whole vocabulary",
    ),
    "--speculative-adaptive": (lambda a: a.speculative_adaptive, "use --speculative-ddtree-adaptive"),
    "--speculative-draft-sink-size": (
        lambda a: a.speculative_draft_sink_size,
        "leave it out: the drafter's window has no sink",
    ),
}


def refuse_unsupported(args: Any) -> None:
    """Raise ValueError for the first setting that DDTREE cannot honour."""
    if args.speculative_draft_model_path is None:
        raise ValueError(f"{ALGORITHM_NAME} needs a DFlash drafter: give --speculative-draft-model-path.")
    for flag, (is_trouble, remedy) in _REFUSALS.items():
        if is_trouble(args):
            raise ValueError(f"{flag} does not work with --speculative-algorithm {ALGORITHM_NAME}: {remedy}.")
    for flag in ("attention_backend", "decode_attention_backend", "prefill_attention_backend"):
        value = getattr(args, flag)
        if value != BACKEND_NAME and not (value is None and flag != "attention_backend"):
            raise ValueError(
                f"--{flag.replace('_', '-')} is {value!r}: {ALGORITHM_NAME} verifies trees with "
                f"--attention-backend {BACKEND_NAME}, for prefill and decode alike."
            )


def fill_in(args: Any) -> None:
    """Resolve block, budget and verify width from the drafter's config and the flags."""
    block = _block_size(args)
    budget, topk = int(args.speculative_ddtree_budget), int(args.speculative_ddtree_topk)
    if not block - 1 <= budget < MAX_WIDTH:
        raise ValueError(
            f"--speculative-ddtree-budget {budget} is out of range: a block of {block} takes {block - 1} nodes or "
            f"more (lower --speculative-dflash-block-size for smaller trees), and at most {MAX_WIDTH - 1} fit."
        )
    if not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"--speculative-ddtree-topk {topk} is out of range: give 1 to {MAX_TOPK} candidates.")
    args.speculative_dflash_block_size = block
    args.speculative_num_draft_tokens = max(block, budget + 1)
    # Upstream sizes pools by steps x topk as well; the verify width covers the tree.
    args.speculative_num_steps = 1
    args.speculative_eagle_topk = 1
    _resolve_draft_backend(args)
    if args.speculative_draft_window_size is not None:
        _check_draft_window(args)
    if args.max_running_requests is None:
        args.max_running_requests = DEFAULT_MAX_RUNNING_REQUESTS


def _resolve_draft_backend(args: Any) -> None:
    from sglang_sm120.cpu.speculative import DRAFT_BACKEND_NAME

    choices = (DRAFT_BACKEND_NAME,) if args.device == "cpu" else GPU_DRAFT_BACKENDS
    asked = args.speculative_draft_attention_backend
    if asked is None:
        args.speculative_draft_attention_backend = choices[0]
    elif asked not in choices:
        raise ValueError(
            f"--speculative-draft-attention-backend {asked} does not run draft blocks of {ALGORITHM_NAME}: "
            f"use {', '.join(choices)}."
        )


def _check_draft_window(args: Any) -> None:
    window, block = args.speculative_draft_window_size, args.speculative_dflash_block_size
    if window < block:
        raise ValueError(f"--speculative-draft-window-size {window} is below the draft block: give {block} or more.")
    # FlashInfer plans a replay with the lengths it is told, and of a window in pages only a bound is known then.
    if (args.page_size or 1) > 1 and args.speculative_draft_attention_backend == "flashinfer":
        raise ValueError(
            f"--speculative-draft-attention-backend flashinfer does not work with --speculative-draft-window-size "
            f"{window} and --page-size {args.page_size}: use triton, or --page-size 1."
        )
    logger.info("%s drafts with --speculative-draft-window-size %d, whatever a warning says.", ALGORITHM_NAME, window)


def _block_size(args: Any) -> int:
    """Draft block width: the flag, else the drafter's own. Refuses drafters with parts that DDTREE would leave out."""
    from sglang.srt.speculative.dflash_utils import is_nemotron_35_draft_config, parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    path = args.speculative_draft_model_path
    config = get_config(
        path,
        trust_remote_code=args.trust_remote_code,
        revision=args.speculative_draft_model_revision,
        model_override_args=json.loads(args.json_model_override_args),
    )
    draft = parse_dflash_draft_config(draft_hf_config=config)
    has_head = draft.is_domino or draft.selector_rank or "LiLiCorrDraftModel" in (config.architectures or ())
    if has_head or is_nemotron_35_draft_config(config):
        what = "a head of its own (Domino, a candidate selector or LiLiCorr)" if has_head else "its own embedding"
        raise ValueError(
            f"--speculative-draft-model-path {path}: {ALGORITHM_NAME} takes plain DFlash drafters; this one has {what}."
        )
    block = args.speculative_dflash_block_size or draft.resolve_block_size(default=None)
    if block is None:
        raise ValueError(f"{path} names no block_size: give --speculative-dflash-block-size.")
    if not 2 <= block <= MAX_DEPTH + 1:
        raise ValueError(f"--speculative-dflash-block-size {block} is out of range: give 2 to {MAX_DEPTH + 1} tokens.")
    return int(block)

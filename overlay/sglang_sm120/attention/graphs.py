"""Says when a decode or verify step leaves its CUDA graph: upstream falls back to eager without a word."""

from __future__ import annotations

import logging
from typing import Any

from sglang_sm120.attention import metrics

logger = logging.getLogger(__name__)
_told: set[str] = set()


def note_fallback(output: Any, runner: Any, forward_batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """After `ModelRunner.forward`: count a step that ran eagerly beside captured graphs, log each reason once."""
    mode = forward_batch.forward_mode
    if output.can_run_graph or not runner.decode_cuda_graph_capture_bs:
        return
    if not (mode.is_decode() or mode.is_target_verify()):
        return
    reason = _reason(runner.decode_cuda_graph_runner, forward_batch)
    metrics.count_fallback(mode.name.lower())
    if reason not in _told:
        _told.add(reason)
        logger.warning("sm120: a %s step runs without its CUDA graph: %s (told once)", mode.name.lower(), reason)


def _reason(runner: Any, forward_batch: Any) -> str:
    width = getattr(forward_batch.spec_info, "num_tokens_per_req", 0)
    if width > 0 and width != runner.captured_req_width:
        return f"{width} tokens a request, the graphs were captured for {runner.captured_req_width}"
    if forward_batch.batch_size > runner.max_bs:
        return f"batch of {forward_batch.batch_size} over --cuda-graph-max-bs-decode {runner.max_bs}"
    return "the batch needs something that no captured graph has (token embeddings, two-batch overlap or DP padding)"

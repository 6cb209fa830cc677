"""The target's choice after every node of a draft tree: what the walk follows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo


class TreeVerifyInput(DFlashVerifyInput):
    """A verify batch whose rows see the nodes that the backend's `tree_words` name, not all earlier rows."""

    has_tree_words: ClassVar[bool] = True


def adjust_logits(logits: Tensor, sampling: SamplingBatchInfo, width: int) -> None:
    """Add logit bias and run custom logit processors on `logits [B * width, V]`, in place."""
    from sglang.srt.layers.sampler import apply_custom_logit_processor

    if sampling.has_custom_logit_processor:
        apply_custom_logit_processor(logits, sampling, num_tokens_in_batch=width)
    if sampling.logit_bias is not None:
        logits.view(-1, width, logits.shape[1]).add_(sampling.logit_bias[:, None])


def choose(
    logits: Tensor, positions: Tensor, sampling: SamplingBatchInfo | None, sampler: Sampler, width: int
) -> Tensor:
    """`[B * width]` int64: the argmax of each row, or one draw from each row's distribution, filters applied.

    The draws are upstream's sampler's (temperature, top-k, top-p, min-p; a greedy request in a mixed batch is top-k 1).
    """
    if sampling is None or sampling.is_all_greedy:
        return logits.argmax(-1)
    rows = _a_row_a_node(sampling, width)
    simple = not (rows.need_top_p_sampling or rows.need_top_k_sampling or rows.need_min_p_sampling)
    probs = torch.softmax(logits.float() / rows.temperatures, dim=-1)
    return sampler._sample_from_probs(probs, rows, positions, simple)[0].long()


def _a_row_a_node(sampling: SamplingBatchInfo, width: int) -> Any:
    def repeat(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.repeat_interleave(width, dim=0)

    return dataclasses.replace(
        sampling,
        temperatures=repeat(sampling.temperatures),
        top_ps=repeat(sampling.top_ps),
        top_ks=repeat(sampling.top_ks),
        min_ps=repeat(sampling.min_ps),
        sampling_mask_batch_indices=None,
    )

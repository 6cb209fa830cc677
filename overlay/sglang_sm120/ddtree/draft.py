"""From the drafter's hidden states to trees: the K best tokens of every block position, by the target's LM head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sglang.srt.models.dflash import candidate_topk
from torch import Tensor, nn

from sglang_sm120.ddtree.tree import DraftTree, build_trees, empty_trees


@dataclass
class TreeDrafter:
    """Proposes trees for a batch of draft blocks.

    Under tensor parallelism every rank gathers the same candidates and builds the same tree: ids are global, and the
    quantities are log-probabilities over the whole vocabulary, never over a rank's share of it.
    """

    lm_head: nn.Module
    block_size: int
    topk: int
    budget: int

    def build(self, hidden: Tensor, roots: Tensor, out: DraftTree | None = None) -> DraftTree:
        """Trees for block outputs `hidden [B * block, H]`; a block's position 0 is the root and predicts nothing."""
        hidden = hidden.view(-1, self.block_size, hidden.shape[-1])[:, 1:]
        batch, depth = hidden.shape[:2]
        ids, values, normalizer = candidate_topk(hidden.flatten(0, 1), self.lm_head, self.topk, with_partition=True)
        log_probs = values.float() - normalizer.float().view(-1, 1)
        return build_trees(roots, ids.view(batch, depth, -1), log_probs.view(batch, depth, -1), self.budget, out)


class CapturedDrafter:
    """A `TreeDrafter` as the tail of the draft graph: a replay leaves the trees here, at fixed addresses.

    What a graph allocates is good until the next graph of its pool runs, and the walk comes after the target's.
    """

    def __init__(self, drafter: TreeDrafter, max_batch_size: int, device: torch.device) -> None:
        self.drafter = drafter
        self._trees = empty_trees(max_batch_size, drafter.budget + 1, device)

    def __call__(self, hidden_states: Tensor, input_ids: Tensor) -> None:
        """Called under capture with all block outputs and block ids."""
        roots = input_ids.view(-1, self.drafter.block_size)[:, 0]
        self.drafter.build(hidden_states, roots, self._trees.rows(len(roots)))

    def trees(self, batch_size: int) -> DraftTree:
        """The trees of the last replay."""
        return self._trees.rows(batch_size)

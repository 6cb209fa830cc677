# ruff: noqa: ANN001, ANN202 -- arguments of Triton kernels are pointers and constexprs
"""The Triton kernels of `tree`: one small program a request, nothing on the host.

`build`: the frontier lives in registers, one packed int64 candidate a slot (see `tree`). A step is two reductions over
the slots: the smallest key, and the mass of its parent. The popped slot takes the sibling, a new slot the first child.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_sm120.attention.reference import mask_words
from sglang_sm120.ddtree import tree as _tree
from sglang_sm120.ddtree.tree import DraftTree, Path

_RANK_BITS = tl.constexpr(_tree.RANK_BITS)
_PARENT_BITS = tl.constexpr(_tree.PARENT_BITS)
_LOW_BITS = tl.constexpr(_tree.LOW_BITS)
_DEPTH_MASK = tl.constexpr(_tree.MAX_DEPTH)
_RANK_MASK = tl.constexpr(_tree.MAX_TOPK - 1)
_PARENT_MASK = tl.constexpr(_tree.MAX_WIDTH - 1)
_EMPTY = tl.constexpr(_tree.EMPTY_KEY)
_INFINITY_BITS = tl.constexpr(_tree.INFINITY_BITS)


@triton.jit
def _candidate_key(log_probs, mass, parent, depth, rank, D: tl.constexpr, K: tl.constexpr):
    """Packed candidate (depth, rank) below `parent`, whose mass is `mass`; _EMPTY if it does not exist."""
    inside = (depth <= D) & (rank < K)
    log_prob = tl.load(log_probs + (depth - 1) * K + rank, mask=inside, other=-float("inf")).to(tl.float32)
    log_prob = tl.where(log_prob > 0.0, 0.0, log_prob)
    bits = tl.abs(mass + log_prob).to(tl.int32, bitcast=True).to(tl.int64)
    low = (((depth << _RANK_BITS) | rank) << _PARENT_BITS) | parent
    return tl.where(bits < _INFINITY_BITS, (bits << _LOW_BITS) | low, _EMPTY)


@triton.jit
def _build(
    roots, ids, log_probs, tokens, parents, depths, words,
    D: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    ids += request * D * K
    log_probs += request * D * K
    tokens += request * Q
    parents += request * Q
    depths += request * Q
    root = tl.load(roots + request)
    tl.store(tokens, root)
    tl.store(parents, -1)
    tl.store(depths, 0)

    slots = tl.arange(0, SLOTS)
    masses = tl.zeros((SLOTS,), tl.float32)
    zero = tl.program_id(0) * 0
    frontier = tl.where(slots == 0, _candidate_key(log_probs, 0.0, zero, zero + 1, zero, D, K), _EMPTY)
    for node in range(1, Q):
        best = tl.min(frontier, axis=0)
        taken = best != _EMPTY
        parent = tl.where(taken, best & _PARENT_MASK, 0).to(tl.int32)
        rank = tl.where(taken, (best >> _PARENT_BITS) & _RANK_MASK, 0).to(tl.int32)
        depth = tl.where(taken, (best >> (_PARENT_BITS + _RANK_BITS)) & _DEPTH_MASK, 1).to(tl.int32)
        mass = -(best >> _LOW_BITS).to(tl.int32).to(tl.float32, bitcast=True)
        parent_mass = tl.sum(tl.where(slots == parent, masses, 0.0), axis=0)
        masses = tl.where(slots == node, mass, masses)
        tl.store(tokens + node, tl.where(taken, tl.load(ids + (depth - 1) * K + rank), root))
        tl.store(parents + node, tl.where(taken, parent, -1))
        tl.store(depths + node, tl.where(taken, depth, 0))
        sibling = _candidate_key(log_probs, parent_mass, parent, depth, rank + 1, D, K)
        child = _candidate_key(log_probs, mass, zero + node, depth + 1, zero, D, K)
        frontier = tl.where(slots == node, child, tl.where(frontier == best, sibling, frontier))
        frontier = tl.where(taken, frontier, _EMPTY)
    tl.debug_barrier()

    in_tree = slots < Q
    for word in tl.static_range(W):
        ancestor = slots
        alive = in_tree
        bits = tl.zeros((SLOTS,), tl.int32)
        for _ in range(D + 1):
            bits |= tl.where(alive & (ancestor // 32 == word), 1 << (ancestor % 32), 0)
            ancestor = tl.load(parents + ancestor, mask=alive, other=-1)
            alive = ancestor >= 0
        tl.store(words + (request * Q + slots) * W + word, bits, mask=in_tree)


@triton.jit
def _walk(
    tokens, parents, choices, path_nodes, path_tokens, commit_lens,
    D: tl.constexpr, Q: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    in_tree = slots < Q
    token = tl.load(tokens + request * Q + slots, mask=in_tree, other=0)
    parent = tl.load(parents + request * Q + slots, mask=in_tree, other=-1)
    node = tl.program_id(0) * 0
    length = tl.program_id(0) * 0
    alive = node == 0
    for depth in range(D + 1):
        choice = tl.load(choices + request * Q + node)
        tl.store(path_nodes + request * (D + 1) + depth, tl.where(alive, node, 0).to(tl.int64))
        tl.store(path_tokens + request * (D + 1) + depth, tl.where(alive, choice, 0))
        length += alive.to(tl.int32)
        following = tl.min(tl.where((parent == node) & (token == choice), slots, SLOTS), axis=0)
        alive = alive & (following < SLOTS)
        node = tl.where(alive, following, 0)
    tl.store(commit_lens + request, length)


def build_trees(roots: Tensor, ids: Tensor, log_probs: Tensor, budget: int) -> DraftTree:
    """See `tree.build_trees`."""
    batch, max_depth, topk = ids.shape
    width = budget + 1
    words = mask_words(width)
    tree = DraftTree(
        tokens=torch.empty((batch, width), dtype=torch.int64, device=ids.device),
        parents=torch.empty((batch, width), dtype=torch.int32, device=ids.device),
        depths=torch.empty((batch, width), dtype=torch.int32, device=ids.device),
        words=torch.empty((batch, width, words), dtype=torch.int32, device=ids.device),
    )
    _build[(batch,)](
        roots, ids.contiguous(), log_probs.contiguous(), tree.tokens, tree.parents, tree.depths, tree.words,
        D=max_depth, K=topk, Q=width, W=words, SLOTS=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return tree


def walk(tree: DraftTree, choices: Tensor, max_depth: int) -> Path:
    """See `tree.walk`."""
    batch, width = choices.shape
    path = Path(
        nodes=torch.empty((batch, max_depth + 1), dtype=torch.int64, device=choices.device),
        tokens=torch.empty((batch, max_depth + 1), dtype=torch.int64, device=choices.device),
        commit_lens=torch.empty((batch,), dtype=torch.int32, device=choices.device),
    )
    _walk[(batch,)](
        tree.tokens.contiguous(), tree.parents.contiguous(), choices.contiguous(),
        path.nodes, path.tokens, path.commit_lens,
        D=max_depth, Q=width, SLOTS=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return path

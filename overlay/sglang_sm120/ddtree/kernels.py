# ruff: noqa: ANN001, ANN202 -- arguments of Triton kernels are pointers and constexprs
"""The Triton kernels of `tree`: one small program a request, nothing on the host.

`_build`: the frontier lives in registers, one packed int64 candidate a slot (see `tree`). A step is two reductions over
the slots: the smallest key, and the mass of its parent. The popped slot takes the sibling, a new slot the first child.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_sm120.ddtree import tree as _tree
from sglang_sm120.ddtree.tree import DraftTree, Path, Window

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
    roots, root_stride, ids, log_probs, tokens, parents, depths, words, masses_out,
    D: tl.constexpr, K: tl.constexpr, Q: tl.constexpr, W: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    ids += request * D * K
    log_probs += request * D * K
    tokens += request * Q
    parents += request * Q
    depths += request * Q
    root = tl.load(roots + request * root_stride)
    tl.store(tokens, root)
    tl.store(parents, -1)
    tl.store(depths, 0)

    slots = tl.arange(0, SLOTS)
    masses = tl.where(slots == 0, 0.0, -float("inf"))
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
        masses = tl.where((slots == node) & taken, mass, masses)
        tl.store(tokens + node, tl.where(taken, tl.load(ids + (depth - 1) * K + rank), root))
        tl.store(parents + node, tl.where(taken, parent, -1))
        tl.store(depths + node, tl.where(taken, depth, 0))
        sibling = _candidate_key(log_probs, parent_mass, parent, depth, rank + 1, D, K)
        child = _candidate_key(log_probs, mass, zero + node, depth + 1, zero, D, K)
        frontier = tl.where(slots == node, child, tl.where(frontier == best, sibling, frontier))
        frontier = tl.where(taken, frontier, _EMPTY)
    tl.debug_barrier()

    in_tree = slots < Q
    tl.store(masses_out + request * Q + slots, masses, mask=in_tree)
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
def _open(
    roots, prefix_lens, req_pool_indices, req_to_token, row_stride, slots, block_ids, block_positions, mask_token,
    Q: tl.constexpr, F: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    position = tl.load(prefix_lens + request).to(tl.int64) + column
    row = req_to_token + tl.load(req_pool_indices + request).to(tl.int64) * row_stride
    tl.store(slots + request * Q + column, tl.load(row + position, mask=column < Q).to(tl.int64), mask=column < Q)
    token = tl.where(column == 0, tl.load(roots + request), mask_token)
    tl.store(block_ids + request * F + column, token, mask=column < F)
    tl.store(block_positions + request * F + column, position, mask=column < F)


@triton.jit
def _stage(
    tokens, parents, depths, words, prefix_lens, tree_stride, words_stride, out_tokens, out_positions, out_parents,
    out_words, out_words_stride, Q: tl.constexpr, W: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    in_tree = node < Q
    at, out = request * tree_stride + node, request * Q + node
    tl.store(out_tokens + out, tl.load(tokens + at, mask=in_tree), mask=in_tree)
    tl.store(out_parents + out, tl.load(parents + at, mask=in_tree), mask=in_tree)
    position = tl.load(prefix_lens + request).to(tl.int64) + tl.load(depths + at, mask=in_tree)
    tl.store(out_positions + out, position, mask=in_tree)
    words += request * words_stride + node * W
    for word in tl.static_range(W):
        tl.store(out_words + out * out_words_stride + word, tl.load(words + word, mask=in_tree), mask=in_tree)


@triton.jit
def _walk(
    tokens, parents, choices, slots, prefix_lens, is_live,
    path_nodes, path_tokens, path_rows, sources, targets, commit_lens, bonus, ends,
    D: tl.constexpr, Q: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0).to(tl.int64)
    nodes = tl.arange(0, NODES)
    in_tree = nodes < Q
    token = tl.load(tokens + request * Q + nodes, mask=in_tree, other=0)
    parent = tl.load(parents + request * Q + nodes, mask=in_tree, other=-1)
    node = tl.program_id(0) * 0
    length = tl.program_id(0) * 0
    alive = node == 0
    live = tl.load(is_live)
    last = tl.load(choices + request * Q)
    for depth in range(D + 1):
        out = request * (D + 1) + depth
        choice = tl.load(choices + request * Q + node)
        source = tl.load(slots + request * Q + node)
        target = tl.load(slots + request * Q + depth)
        tl.store(path_nodes + out, node.to(tl.int64))
        tl.store(path_tokens + out, tl.where(alive, choice, 0))
        tl.store(path_rows + out, request * Q + node)
        tl.store(sources + out, source)
        tl.store(targets + out, tl.where(alive & (source != target) & (live != 0), target, -1))
        last = tl.where(alive, choice, last)
        length += alive.to(tl.int32)
        following = tl.min(tl.where((parent == node) & (token == choice), nodes, NODES), axis=0)
        alive = alive & (following < NODES)
        node = tl.where(alive, following, 0)
    length = tl.where(live != 0, length, 0)
    tl.store(commit_lens + request, length)
    tl.store(bonus + request, last)
    tl.store(ends + request, tl.load(prefix_lens + request).to(tl.int64) + length)


def build_trees(roots: Tensor, ids: Tensor, log_probs: Tensor, out: DraftTree) -> DraftTree:
    """See `tree.build_trees`."""
    batch, max_depth, topk = ids.shape
    words = out.words.shape[2]
    _build[(batch,)](
        roots, roots.stride(0), ids.contiguous(), log_probs.contiguous(),
        out.tokens, out.parents, out.depths, out.words, out.masses,
        D=max_depth, K=topk, Q=out.width, W=words, SLOTS=triton.next_power_of_2(out.width), num_warps=1,
    )  # fmt: skip
    return out


def open_window(
    roots: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    width: int,
    block: int,
    mask_token: int,
) -> Window:
    """See `tree.open_window`."""
    window = Window(*(_int64(len(roots), columns, like=roots) for columns in (width, block, block)))
    _open[(len(roots),)](
        roots, prefix_lens, req_pool_indices, req_to_token, req_to_token.stride(0),
        window.slots, window.block_ids, window.block_positions, mask_token,
        Q=width, F=block, COLUMNS=triton.next_power_of_2(max(width, block)), num_warps=1,
    )  # fmt: skip
    return window


def stage(tree: DraftTree, prefix_lens: Tensor, words: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """See `tree.stage`."""
    batch, width = tree.tokens.shape
    tokens, positions = (_int64(batch * width, like=tree.tokens) for _ in range(2))
    _stage[(batch,)](
        tree.tokens, tree.parents, tree.depths, tree.words, prefix_lens, tree.tokens.stride(0), tree.words.stride(0),
        tokens, positions, parents, words, words.stride(0),
        Q=width, W=tree.words.shape[2], NODES=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return tokens, positions


def walk(
    tokens: Tensor,
    parents: Tensor,
    choices: Tensor,
    slots: Tensor,
    prefix_lens: Tensor,
    max_depth: int,
    is_live: Tensor | None = None,
) -> Path:
    """See `tree.walk`."""
    batch, width = choices.shape
    if is_live is None:
        is_live = torch.ones(1, dtype=torch.int32, device=choices.device)
    nodes, path_tokens, rows, sources, targets = (_int64(batch, max_depth + 1, like=choices) for _ in range(5))
    path = Path(
        nodes, path_tokens, rows, sources, targets,
        commit_lens=torch.empty((batch,), dtype=torch.int32, device=choices.device),
        bonus=_int64(batch, like=choices), ends=_int64(batch, like=choices),
    )  # fmt: skip
    _walk[(batch,)](
        tokens.contiguous(), parents.contiguous(), choices.contiguous(), slots.contiguous(), prefix_lens, is_live,
        path.nodes, path.tokens, path.rows, path.sources, path.targets, path.commit_lens, path.bonus, path.ends,
        D=max_depth, Q=width, NODES=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
    return path


def _int64(*shape: int, like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device=like.device)

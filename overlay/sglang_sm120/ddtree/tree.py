"""Draft trees and the walk along them (DDTree, arXiv 2604.12989).

A block drafter gives one token distribution a position. The tree holds the most probable prefixes under the product
of those distributions: best-first search pops the best candidate, which offers its next sibling and its first child.

```
 Window [B, Q] ──────────────┬─ slots the nodes are written to ─────────────────────────────┐
 log-probs [B, D, K] ─build_trees─► DraftTree [B, Q] ─stage, verify─► choices [B, Q] ─walk─► Path [B, D + 1]
 ids       [B, D, K]                (root + budget)                   (argmax, or a sample a node)
```

Candidates are ordered by mass (sum of float32 log-probabilities), then smaller depth, rank and parent index; the order
is total, so the batched torch version and the Triton kernels give the same tree to the bit, that of a plain heap
(`tests/ddtree/test_tree.py`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sglang_sm120.attention.reference import mask_words

# A candidate packs to one integer, smaller is better: bits of -mass, then depth (6), rank (7) and parent (10).
DEPTH_BITS, RANK_BITS, PARENT_BITS = 6, 7, 10
LOW_BITS = DEPTH_BITS + RANK_BITS + PARENT_BITS
MAX_DEPTH = 2**DEPTH_BITS - 1
MAX_TOPK = 2**RANK_BITS
MAX_WIDTH = 2**PARENT_BITS
EMPTY_KEY = 2**63 - 1
INFINITY_BITS = 0x7F800000


@dataclass(frozen=True)
class DraftTree:
    """Trees of a batch, padded to one width Q: node 0 is the root, the committed token.

    tokens: `[B, Q]` int64. Padding repeats the root's token; only `parents` tells it apart.
    parents: `[B, Q]` int32 index of the parent, -1 for the root and for padding.
    depths: `[B, Q]` int32, 0 for the root and for padding.
    words: `[B, Q, ceil(Q / 32)]` int32, ancestor bitmask: bit j of a row is set where node j is visible, itself too.
    masses: `[B, Q]` float32 log-probability of the prefix that ends in a node, by the drafter; -inf for padding.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor
    masses: Tensor

    @property
    def width(self) -> int:
        """Nodes a request, root and padding included."""
        return self.tokens.shape[1]

    def first(self, width: int) -> DraftTree:
        """The trees of budget `width - 1`: a best-first tree is the beginning of every larger one. Views."""
        return DraftTree(*(part[:, :width] for part in self.parts()))

    def rows(self, count: int) -> DraftTree:
        """The trees of the first `count` requests. Views."""
        return DraftTree(*(part[:count] for part in self.parts()))

    def parts(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the fields."""
        return self.tokens, self.parents, self.depths, self.words, self.masses


@dataclass(frozen=True)
class Window:
    """Where a step's nodes go, and the block that the drafter fills, F tokens a request.

    slots: `[B, Q]` int64 KV slots after the committed prefix; node i is written to slot i.
    block_ids, block_positions: `[B, F]` int64, the committed token and F - 1 masks, at chain positions.
    """

    slots: Tensor
    block_ids: Tensor
    block_positions: Tensor


@dataclass(frozen=True)
class Path:
    """The accepted way down each tree, D + 1 entries a request of which `commit_lens` count.

    nodes: `[B, D + 1]` int64 tree nodes from the root on; 0 past the end.
    tokens: `[B, D + 1]` int64 committed tokens: the target's choice at each of those nodes; 0 past the end.
    rows: `[B, D + 1]` int64 the nodes as rows of the verify batch.
    sources, targets: `[B, D + 1]` int64 slots that the nodes' KV is in and belongs in; target -1 where it is there, or
        past the end.
    commit_lens: `[B]` integers, at least 1.
    bonus: `[B]` int64 the last committed token, root of the next tree.
    ends: `[B]` int64 committed length after this step.
    """

    nodes: Tensor
    tokens: Tensor
    rows: Tensor
    sources: Tensor
    targets: Tensor
    commit_lens: Tensor
    bonus: Tensor
    ends: Tensor


def empty_trees(batch: int, width: int, device: torch.device | str) -> DraftTree:
    """Memory for trees."""
    return DraftTree(
        tokens=torch.empty((batch, width), dtype=torch.int64, device=device),
        parents=torch.empty((batch, width), dtype=torch.int32, device=device),
        depths=torch.empty((batch, width), dtype=torch.int32, device=device),
        words=torch.empty((batch, width, mask_words(width)), dtype=torch.int32, device=device),
        masses=torch.empty((batch, width), dtype=torch.float32, device=device),
    )


def build_trees(roots: Tensor, ids: Tensor, log_probs: Tensor, budget: int, out: DraftTree | None = None) -> DraftTree:
    """Best-first trees of `budget` nodes and a root for each request; no host sync.

    roots: `[B]` int64 committed tokens. ids, log_probs: `[B, D, K]` int64 and float, descending along K.
    out: contiguous memory for the result; new memory where None.
    """
    _check(ids, budget)
    if roots.is_cuda:
        from sglang_sm120.ddtree import kernels

        return kernels.build_trees(roots, ids, log_probs, out or empty_trees(len(roots), budget + 1, roots.device))
    built = build_trees_torch(roots, ids, log_probs, budget)
    if out is None:
        return built
    for target, part in zip(out.parts(), built.parts(), strict=True):
        target.copy_(part)
    return out


def lone_roots(roots: Tensor) -> DraftTree:
    """Trees of the root alone, for `roots [B]`: a step without speculation."""
    return DraftTree(roots[:, None], *_lone(len(roots), roots.device))


@cache
def _lone(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What all trees of a root alone share: made once, as such a step is there to cost little."""
    column = torch.zeros((batch, 1), dtype=torch.int32, device=device)
    return column - 1, column, column[..., None] + 1, column.float()


def open_window(
    roots: Tensor,
    prefix_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    width: int,
    block: int,
    mask_token: int,
) -> Window:
    """The step's slots and draft block, from rows that have room for both; no host sync.

    roots, prefix_lens, req_pool_indices: `[B]` integers. req_to_token: `[max_requests, max_context]` int32.
    """
    if roots.is_cuda:
        from sglang_sm120.ddtree import kernels

        return kernels.open_window(roots, prefix_lens, req_pool_indices, req_to_token, width, block, mask_token)
    positions = prefix_lens[:, None] + torch.arange(max(width, block))
    slots = req_to_token[req_pool_indices[:, None], positions[:, :width]].long()
    ids = torch.full((len(roots), block), mask_token)
    ids[:, 0] = roots
    return Window(slots, ids, positions[:, :block])


def stage(tree: DraftTree, prefix_lens: Tensor, words: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """Put trees where the verify pass reads them; no host sync. Returns its token ids and positions, `[B * Q]` int64.

    words: int32 `[>= B * Q, W]`, parents: int32 `[>= B * Q]`; the first rows are overwritten.
    """
    if tree.tokens.is_cuda:
        from sglang_sm120.ddtree import kernels

        return kernels.stage(tree, prefix_lens, words, parents)
    rows = tree.tokens.numel()
    words[:rows, : tree.words.shape[2]] = tree.words.flatten(0, 1)
    parents[:rows] = tree.parents.flatten()
    return tree.tokens.flatten(), (prefix_lens[:, None] + tree.depths).flatten()


def _check(ids: Tensor, budget: int) -> None:
    depths, topk = ids.shape[1:]
    if not 1 <= topk <= MAX_TOPK or depths > MAX_DEPTH or not 0 <= budget < MAX_WIDTH:
        raise ValueError(
            f"a draft tree takes 1..{MAX_TOPK} candidates a position, at most {MAX_DEPTH} positions and a budget of "
            f"0..{MAX_WIDTH - 1}; got {topk} candidates, {depths} positions, budget {budget}"
        )


def build_trees_torch(roots: Tensor, ids: Tensor, log_probs: Tensor, budget: int) -> DraftTree:
    """`build_trees` in torch operations, batched over the requests."""
    batch, max_depth, topk = ids.shape
    width, rows = budget + 1, torch.arange(batch, device=ids.device)
    log_probs = log_probs.float().clamp(max=0.0)
    tokens = roots[:, None].repeat(1, width)
    parents = torch.full((batch, width), -1, dtype=torch.int32, device=ids.device)
    depths = torch.zeros_like(parents)
    masses = torch.full((batch, width), -torch.inf, dtype=torch.float32, device=ids.device)
    masses[:, 0] = 0.0
    frontier = torch.full((batch, width), EMPTY_KEY, dtype=torch.int64, device=ids.device)

    def keys(parent: Tensor, depth: Tensor, rank: Tensor) -> tuple[Tensor, Tensor]:
        """Packed candidates and their masses; EMPTY_KEY where there is none."""
        inside = (depth <= max_depth) & (rank < topk)
        at = (depth.clamp(1, max_depth) - 1, rank.clamp(max=topk - 1))
        mass = masses[rows, parent] + log_probs[rows, at[0], at[1]]
        bits = mass.abs().view(torch.int32).long()
        low = ((depth << RANK_BITS | rank) << PARENT_BITS) | parent
        return torch.where(inside & (bits < INFINITY_BITS), bits << LOW_BITS | low, EMPTY_KEY), mass

    zeros = torch.zeros(batch, dtype=torch.int64, device=ids.device)
    if budget:
        frontier[:, 0] = keys(zeros, zeros + 1, zeros)[0]
    for node in range(1, width):
        best, slot = frontier.min(dim=1)
        taken = best != EMPTY_KEY
        parent = torch.where(taken, best & (MAX_WIDTH - 1), 0)
        rank = torch.where(taken, best >> PARENT_BITS & (MAX_TOPK - 1), 0)
        depth = torch.where(taken, best >> (PARENT_BITS + RANK_BITS) & MAX_DEPTH, 1)
        masses[:, node] = torch.where(taken, keys(parent, depth, rank)[1], -torch.inf)
        tokens[:, node] = torch.where(taken, ids[rows, depth - 1, rank], roots)
        parents[:, node] = torch.where(taken, parent, -1).int()
        depths[:, node] = torch.where(taken, depth, 0).int()
        sibling = keys(parent, depth, rank + 1)[0]
        child = keys(zeros + node, depth + 1, zeros)[0]
        frontier[rows, slot] = torch.where(taken, sibling, EMPTY_KEY)
        frontier[:, node] = torch.where(taken, child, EMPTY_KEY)
    return DraftTree(tokens, parents, depths, ancestor_words(parents, max_depth), masses)


def ancestor_words(parents: Tensor, max_depth: int) -> Tensor:
    """Ancestor bitmask `[B, Q, W]` int32 of trees given by `parents [B, Q]`: each node, its ancestors, and no other."""
    batch, width = parents.shape
    words = torch.zeros((batch, width, mask_words(width)), dtype=torch.int64, device=parents.device)
    index = torch.arange(width, device=parents.device).expand(batch, width)
    node, alive = index, torch.ones_like(index, dtype=torch.bool)
    for _ in range(max_depth + 1):
        bit = torch.where(alive, 1 << (node & 31), 0)
        # A node meets each ancestor once, so adding bits is setting them.
        words.scatter_add_(2, (node >> 5)[..., None], bit[..., None])
        parent = parents.gather(1, node).long()
        alive = alive & (parent >= 0)
        node = parent.clamp(min=0)
    return words.to(torch.uint32).view(torch.int32)


def walk(
    tokens: Tensor,
    parents: Tensor,
    choices: Tensor,
    slots: Tensor,
    prefix_lens: Tensor,
    max_depth: int,
    is_live: Tensor | None = None,
) -> Path:
    """Follow the target's choice from the root while a child carries it; no host sync.

    tokens, parents: `[B, Q]` of the trees. slots: `[B, Q]` int64 of their window. prefix_lens: `[B]`.
    choices: `[B, Q]` int64, the target's token after each node: its argmax, or one sample from its distribution there.
    A sample is drawn at every node without a look at the tree, so what is committed follows the target exactly.
    is_live: `[1]` int32; where it holds 0 the path is for nobody: no targets, and `commit_lens` of 0.
    """
    if choices.is_cuda:
        from sglang_sm120.ddtree import kernels

        return kernels.walk(tokens, parents, choices, slots, prefix_lens, max_depth, is_live)
    return walk_torch(tokens, parents, choices, slots, prefix_lens, max_depth)


def walk_torch(
    tokens: Tensor, parents: Tensor, choices: Tensor, slots: Tensor, prefix_lens: Tensor, max_depth: int
) -> Path:
    """`walk` in torch operations, batched over the requests."""
    batch, width = choices.shape
    links = parents.clamp(min=0).long()
    chosen = (parents >= 0) & (tokens == choices.gather(1, links))
    on_path = torch.zeros_like(chosen)
    on_path[:, 0] = True
    root, depth = on_path.clone(), torch.zeros_like(links)
    for _ in range(max_depth):
        on_path = root | (chosen & on_path.gather(1, links))
        depth = torch.where(parents >= 0, depth.gather(1, links) + 1, 0)
    past_end = max_depth + 1
    nodes = torch.zeros((batch, past_end + 1), dtype=torch.int64, device=choices.device)
    index = torch.arange(width, device=choices.device).expand(batch, width)
    nodes.scatter_(1, torch.where(on_path, depth, past_end), index)
    nodes = nodes[:, :past_end]
    commit_lens = on_path.sum(1, dtype=torch.int32)
    inside = torch.arange(past_end, device=choices.device) < commit_lens[:, None]
    path_tokens = torch.where(inside, choices.gather(1, nodes), 0)
    sources, targets = slots.gather(1, nodes), slots[:, :past_end]
    return Path(
        nodes=nodes,
        tokens=path_tokens,
        rows=nodes + torch.arange(batch, device=nodes.device)[:, None] * width,
        sources=sources,
        targets=torch.where(inside & (sources != targets), targets, -1),
        commit_lens=commit_lens,
        bonus=path_tokens.gather(1, commit_lens[:, None].long() - 1)[:, 0],
        ends=prefix_lens + commit_lens,
    )


def links(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """First child and next sibling of each node, `[B, Q]` int64 each, -1 for none: the form that grammars walk."""
    width = tree.width
    index = torch.arange(width, device=tree.parents.device)
    parents = tree.parents.long()
    is_child = parents[:, None, :] == index[:, None]
    is_later_sibling = (
        (parents[:, None, :] == parents[:, :, None]) & (index[None, :] > index[:, None]) & (parents >= 0)[:, :, None]
    )

    def first(mask: Tensor) -> Tensor:
        found = torch.where(mask, index, width).amin(-1)
        return torch.where(found < width, found, -1)

    return first(is_child), first(is_later_sibling)


def draw(tree: DraftTree, row: int, texts: list[str], accepted: Set[int] = frozenset()) -> str:
    """One tree as text, a node a line, children below their parent: `texts [Q]` are its nodes, `*` are accepted."""
    parents = tree.parents[row].tolist()
    lines: list[str] = []

    def add(node: int, stem: str, branch: str) -> None:
        lines.append(f"{branch}{texts[node]!r}{' *' if node in accepted else ''}")
        children = [i for i, parent in enumerate(parents) if parent == node]
        for i, child in enumerate(children):
            last = i == len(children) - 1
            add(child, stem + ("   " if last else "│  "), stem + ("└─ " if last else "├─ "))

    add(0, "", "")
    return "\n".join(lines)

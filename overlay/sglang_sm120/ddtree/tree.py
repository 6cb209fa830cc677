"""Draft trees and the walk along them (DDTree, arXiv 2604.12989).

A block drafter gives one token distribution a position. The tree holds the most probable prefixes under the product
of those distributions: best-first search pops the best candidate, which offers its next sibling and its first child.

```
 log-probs [B, D, K] --build_trees--> DraftTree [B, Q] --verify--> choices [B, Q] --walk--> Path [B, D + 1]
 ids       [B, D, K]                  (root + budget)              (argmax, or a sample a node)
```

Candidates are ordered by mass (sum of float32 log-probabilities), then smaller depth, rank and parent index; the order
is total, so the heap here, the batched torch version and the Triton kernels give the same tree to the bit.
"""

from __future__ import annotations

import heapq
from collections.abc import Set
from dataclasses import dataclass

import numpy as np
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
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    words: Tensor

    @property
    def width(self) -> int:
        """Nodes a request, root and padding included."""
        return self.tokens.shape[1]

    def first(self, width: int) -> DraftTree:
        """The trees of budget `width - 1`: a best-first tree is the beginning of every larger one. Views."""
        return DraftTree(*(part[:, :width] for part in (self.tokens, self.parents, self.depths, self.words)))


@dataclass(frozen=True)
class Path:
    """The accepted way down each tree, D + 1 entries a request of which `commit_lens` count.

    nodes: `[B, D + 1]` int64 tree nodes from the root on; 0 past the end.
    tokens: `[B, D + 1]` int64 committed tokens: the target's choice at each of those nodes; 0 past the end.
    commit_lens: `[B]` int32, at least 1.
    """

    nodes: Tensor
    tokens: Tensor
    commit_lens: Tensor

    @property
    def bonus(self) -> Tensor:
        """`[B]` int64: the last committed token, root of the next tree."""
        return self.tokens.gather(1, self.commit_lens[:, None].long() - 1)[:, 0]


def heap_tree(log_probs: np.ndarray, budget: int) -> list[tuple[int, int, int]]:
    """The paper's search for one request, plainly: (parent, depth, rank) of the nodes after the root, in pop order.

    log_probs: `[D, K]` float32, descending along K. Candidates of zero probability are never taken.
    """
    depths, ranks = log_probs.shape
    masses = [np.float32(0.0)]
    nodes: list[tuple[int, int, int]] = []
    frontier: list[tuple[np.float32, int, int, int]] = []

    def offer(parent: int, depth: int, rank: int) -> None:
        if depth <= depths and rank < ranks:
            mass = masses[parent] + np.minimum(log_probs[depth - 1, rank], np.float32(0.0))
            if np.isfinite(mass):
                heapq.heappush(frontier, (-mass, depth, rank, parent))

    offer(0, 1, 0)
    while frontier and len(nodes) < budget:
        cost, depth, rank, parent = heapq.heappop(frontier)
        nodes.append((parent, depth, rank))
        masses.append(-cost)
        offer(parent, depth, rank + 1)
        offer(len(nodes), depth + 1, 0)
    return nodes


def build_trees(roots: Tensor, ids: Tensor, log_probs: Tensor, budget: int) -> DraftTree:
    """Best-first trees of `budget` nodes and a root for each request; no host sync.

    roots: `[B]` int64 committed tokens. ids, log_probs: `[B, D, K]` int64 and float, descending along K.
    """
    _check(ids, budget)
    if roots.is_cuda:
        from sglang_sm120.ddtree import kernels

        return kernels.build_trees(roots, ids, log_probs, budget)
    return build_trees_torch(roots, ids, log_probs, budget)


def lone_roots(roots: Tensor) -> DraftTree:
    """Trees of the root alone: a step without speculation."""
    column = torch.zeros((len(roots), 1), dtype=torch.int32, device=roots.device)
    return DraftTree(roots[:, None], column - 1, column, column[..., None] + 1)


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
    masses = torch.zeros((batch, width), dtype=torch.float32, device=ids.device)
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
        masses[:, node] = keys(parent, depth, rank)[1]
        tokens[:, node] = torch.where(taken, ids[rows, depth - 1, rank], roots)
        parents[:, node] = torch.where(taken, parent, -1).int()
        depths[:, node] = torch.where(taken, depth, 0).int()
        sibling = keys(parent, depth, rank + 1)[0]
        child = keys(zeros + node, depth + 1, zeros)[0]
        frontier[rows, slot] = torch.where(taken, sibling, EMPTY_KEY)
        frontier[:, node] = torch.where(taken, child, EMPTY_KEY)
    return DraftTree(tokens, parents, depths, ancestor_words(parents, max_depth))


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


def walk(tree: DraftTree, choices: Tensor, max_depth: int) -> Path:
    """Follow the target's choice from the root while a child carries it; no host sync.

    choices: `[B, Q]` int64, the target's token after each node: its argmax, or one sample from its distribution there.
    A sample is drawn at every node without a look at the tree, so what is committed follows the target exactly.
    """
    if choices.is_cuda:
        from sglang_sm120.ddtree import kernels

        return kernels.walk(tree, choices, max_depth)
    return walk_torch(tree, choices, max_depth)


def walk_torch(tree: DraftTree, choices: Tensor, max_depth: int) -> Path:
    """`walk` in torch operations, batched over the requests."""
    batch, width = choices.shape
    parents = tree.parents.clamp(min=0).long()
    chosen = (tree.parents >= 0) & (tree.tokens == choices.gather(1, parents))
    on_path = torch.zeros_like(chosen)
    on_path[:, 0] = True
    root = on_path.clone()
    for _ in range(max_depth):
        on_path = root | (chosen & on_path.gather(1, parents))
    past_end = max_depth + 1
    nodes = torch.zeros((batch, past_end + 1), dtype=torch.int64, device=choices.device)
    index = torch.arange(width, device=choices.device).expand(batch, width)
    nodes.scatter_(1, torch.where(on_path, tree.depths.long(), past_end), index)
    nodes = nodes[:, :past_end]
    commit_lens = on_path.sum(1, dtype=torch.int32)
    inside = torch.arange(past_end, device=choices.device) < commit_lens[:, None]
    return Path(nodes, torch.where(inside, choices.gather(1, nodes), 0), commit_lens)


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

"""Tree building, the bitmask and the walk against plain references."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.attention.reference import unpack_mask
from sglang_sm120.ddtree import tree as T


@st.composite
def drafts(draw, max_batch: int = 3):
    """Ids and descending log-probabilities [B, D, K], with ties, impossible candidates and token 0, and a budget.

    Some are a little above 0, as what a rounded normalizer leaves.
    """
    batch, depth, topk = draw(st.integers(1, max_batch)), draw(st.integers(1, 7)), draw(st.integers(1, 8))
    kind = draw(st.sampled_from(["random", "ties", "flat", "sharp", "holes", "above"]))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(batch, depth, 32)) * {"flat": 0.0, "sharp": 8.0}.get(kind, 2.0)
    if kind == "ties":
        logits = np.round(logits)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-log_probs, axis=-1, kind="stable")[..., :topk]
    log_probs = np.take_along_axis(log_probs, order, -1).astype(np.float32)
    if kind == "above":
        log_probs += 0.01 - log_probs[..., :1]
    if kind == "holes":
        log_probs[..., rng.integers(0, topk) :] = -np.inf
    return (
        torch.from_numpy(order),
        torch.from_numpy(log_probs),
        draw(st.sampled_from([0, 1, 2, 7, 8, 16, 31, 32, 33, 64])),
    )


def roots_of(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(100, 100 + len(ids))


def visible(tree: T.DraftTree) -> torch.Tensor:
    return unpack_mask(tree.words, tree.width)


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


@settings(max_examples=150, deadline=None)
@given(drafts())
def test_torch_tree_is_the_heap_tree(case):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget)
    for b in range(len(ids)):
        nodes = heap_tree(log_probs[b].numpy(), budget)
        padding = budget - len(nodes)
        assert tree.parents[b].tolist() == [-1, *(p for p, _, _ in nodes), *[-1] * padding]
        assert tree.depths[b].tolist() == [0, *(d for _, d, _ in nodes), *[0] * padding]
        expected = [int(ids[b, d - 1, r]) for _, d, r in nodes]
        assert tree.tokens[b].tolist() == [100 + b, *expected, *[100 + b] * padding]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 20))
def test_tree_holds_the_most_probable_prefixes(seed, depth, topk, budget):
    """Brute force: the masses of the tree are the `budget` largest of all prefixes."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(size=(1, depth, topk)), axis=-1).astype(np.float32)
    every = []
    for length in range(1, depth + 1):
        for ranks in itertools.product(range(topk), repeat=length):
            mass = np.float32(0)
            for d, r in enumerate(ranks):
                mass = mass + log_probs[0, d, r]
            every.append(mass)
    ids = torch.arange(depth * topk).view(1, depth, topk)
    tree = T.build_trees_torch(torch.tensor([999]), ids, torch.from_numpy(log_probs), budget)
    masses, taken = [np.float32(0)], []
    for node in range(1, budget + 1):
        parent, d = int(tree.parents[0, node]), int(tree.depths[0, node])
        if parent >= 0:
            rank = int(tree.tokens[0, node]) - (d - 1) * topk
            masses.append(masses[parent] + log_probs[0, d - 1, rank])
            taken.append(masses[-1])
    assert sorted(taken, reverse=True) == sorted(every, reverse=True)[:budget]


@settings(max_examples=80, deadline=None)
@given(drafts())
def test_mask_is_the_ancestor_relation(case):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget)
    mask = visible(tree)
    for b in range(len(ids)):
        for node in range(tree.width):
            ancestors, at = set(), node
            while at >= 0:
                ancestors.add(at)
                at = int(tree.parents[b, at])
            assert set(mask[b, node].nonzero()[:, 0].tolist()) == ancestors


@settings(max_examples=80, deadline=None)
@given(drafts())
def test_siblings_share_depth_and_differ_in_token(case):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget)
    for b in range(len(ids)):
        children: dict[int, list[int]] = {}
        for node in range(1, tree.width):
            parent = int(tree.parents[b, node])
            if parent >= 0:
                children.setdefault(parent, []).append(node)
                assert tree.depths[b, node] == tree.depths[b, parent] + 1
        for siblings in children.values():
            tokens = [int(tree.tokens[b, s]) for s in siblings]
            assert len(set(tokens)) == len(tokens)


@settings(max_examples=40, deadline=None)
@given(drafts())
def test_width_one_is_the_chain(case):
    ids, log_probs, _ = case
    log_probs = log_probs.clamp(min=-50.0)
    depth = ids.shape[1]
    tree = T.build_trees_torch(roots_of(ids), ids[..., :1], log_probs[..., :1], depth)
    assert torch.equal(tree.tokens, torch.cat([roots_of(ids)[:, None], ids[..., 0]], dim=1))
    assert torch.equal(tree.depths, torch.arange(depth + 1).int().expand(len(ids), -1))
    assert torch.equal(visible(tree), torch.ones(depth + 1, depth + 1).tril().bool().expand(len(ids), -1, -1))


def plain_walk(tree: T.DraftTree, choices: torch.Tensor, b: int) -> tuple[list[int], list[int]]:
    nodes = [0]
    while True:
        token = int(choices[b, nodes[-1]])
        step = [n for n in range(tree.width) if tree.parents[b, n] == nodes[-1] and tree.tokens[b, n] == token]
        if not step:
            return nodes, [int(choices[b, n]) for n in nodes]
        nodes.append(step[0])


def random_choices(tree: T.DraftTree, seed: int) -> torch.Tensor:
    """Choices that mostly follow some child, so that paths are long; token 0 occurs."""
    rng = np.random.default_rng(seed)
    choices = torch.from_numpy(rng.integers(0, 32, size=tree.tokens.shape))
    for b, node in itertools.product(range(len(choices)), range(tree.width)):
        children = (tree.parents[b] == node).nonzero()[:, 0]
        if len(children) and rng.random() < 0.8:
            choices[b, node] = tree.tokens[b, children[rng.integers(len(children))]]
    return choices


def window_of(tree: T.DraftTree, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct slots in random order, and committed lengths."""
    rng = np.random.default_rng(seed)
    slots = torch.from_numpy(1 + rng.permutation(tree.tokens.numel())).view(tree.tokens.shape)
    return slots, torch.from_numpy(rng.integers(1, 1000, size=len(slots)))


@settings(max_examples=80, deadline=None)
@given(drafts(), st.integers(0, 2**32 - 1))
def test_walk_follows_the_choices(case, seed):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget)
    choices, (slots, prefix_lens) = random_choices(tree, seed), window_of(tree, seed)
    depth = min(ids.shape[1], budget)
    path = T.walk_torch(tree.tokens, tree.parents, choices, slots, prefix_lens, depth)
    for b in range(len(ids)):
        nodes, tokens = plain_walk(tree, choices, b)
        length = int(path.commit_lens[b])
        assert path.nodes[b, :length].tolist() == nodes and path.tokens[b, :length].tolist() == tokens
        assert not path.nodes[b, length:].any() and not path.tokens[b, length:].any()
        assert path.bonus[b] == tokens[-1] and path.ends[b] == prefix_lens[b] + length
        assert path.rows[b, :length].tolist() == [b * tree.width + node for node in nodes]
        kv = {int(slot): node for node, slot in enumerate(slots[b])}
        moves = [(int(s), int(t)) for s, t in zip(path.sources[b], path.targets[b], strict=True) if t >= 0]
        kv |= {target: kv[source] for source, target in moves}
        assert [kv[int(slot)] for slot in slots[b, :length]] == nodes, "the path's KV is at the front of the window"
        assert all(source != target for source, target in moves), "what is in place stays"
        assert (path.targets[b, length:] == -1).all(), "nothing moves past the end"


@settings(max_examples=40, deadline=None)
@given(drafts())
def test_links_visit_every_node_once(case):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget)
    child, sibling = T.links(tree)
    for b in range(len(ids)):
        seen, todo = [], [0]
        while todo:
            node = todo.pop()
            seen.append(node)
            todo += [int(n) for n in (child[b, node], sibling[b, node]) if n >= 0]
        assert sorted(seen) == [0, *(tree.parents[b] >= 0).nonzero()[:, 0].tolist()]


def test_all_candidates_impossible_gives_a_root_that_is_walked_alone():
    ids, log_probs = torch.zeros((1, 3, 4), dtype=torch.long), torch.full((1, 3, 4), float("-inf"))
    tree = T.build_trees(torch.tensor([0]), ids, log_probs, 8)
    assert (tree.parents == -1).all()
    path = T.walk(tree.tokens, tree.parents, torch.zeros((1, 9), dtype=torch.long), *window_of(tree, 0), 3)
    assert path.commit_lens.tolist() == [1] and path.tokens.tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("shape, budget", [((1, 3, 0), 4), ((1, 64, 2), 4), ((1, 3, 200), 4), ((1, 3, 2), 1024)])
def test_impossible_sizes_are_refused(shape, budget):
    with pytest.raises(ValueError, match="draft tree"):
        T.build_trees(torch.zeros(shape[0]).long(), torch.zeros(shape).long(), torch.zeros(shape), budget)


def test_draw_shows_the_tree():
    ids = torch.tensor([[[1, 2], [3, 4]]])
    log_probs = torch.tensor([[[0.6, 0.3], [0.5, 0.4]]]).log()
    tree = T.build_trees(torch.tensor([0]), ids, log_probs, 4)
    assert T.draw(tree, 0, [f"t{t}" for t in tree.tokens[0].tolist()], {0, 1}) == (
        "'t0' *\n├─ 't1' *\n│  ├─ 't3'\n│  └─ 't4'\n└─ 't2'"
    )

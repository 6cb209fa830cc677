"""The Triton kernels against the torch versions; run by test_kernels.py, on the GPU or by Triton's interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.ddtree import kernels
from sglang_sm120.ddtree import tree as T
from test_tree import drafts, random_choices, roots_of, window_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def same(a: T.DraftTree, b: T.DraftTree) -> bool:
    return all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(a.parts(), b.parts(), strict=True))


@settings(max_examples=25, deadline=None)
@given(case=drafts(max_batch=2))
def test_triton_tree_is_the_torch_tree(case):
    ids, log_probs, budget = case
    roots = torch.stack([roots_of(ids), roots_of(ids) - 1], dim=1).to(DEVICE)[:, 0]  # not contiguous, as in the worker
    memory = T.empty_trees(len(ids), budget + 1, DEVICE)
    built = kernels.build_trees(roots, ids.to(DEVICE), log_probs.to(DEVICE), memory)
    assert same(built, T.build_trees_torch(roots_of(ids), ids, log_probs, budget))


@settings(max_examples=25, deadline=None)
@given(case=drafts(max_batch=2), seed=st.integers(0, 2**32 - 1), live=st.booleans())
def test_triton_walk_is_the_torch_walk(case, seed, live):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget)
    choices, (slots, prefix_lens) = random_choices(tree, seed), window_of(tree, seed)
    arguments = tree.tokens, tree.parents, choices, slots, prefix_lens
    depth = min(ids.shape[1], budget)
    is_live = torch.tensor([int(live)], dtype=torch.int32, device=DEVICE)
    path = kernels.walk(*(tensor.to(DEVICE) for tensor in arguments), depth, is_live)
    expected = T.walk_torch(*arguments, depth)
    for field in dataclasses.fields(T.Path):
        got, wanted = getattr(path, field.name).cpu(), getattr(expected, field.name)
        if live or field.name not in ("targets", "commit_lens", "ends"):
            assert torch.equal(got, wanted), field.name
        elif field.name == "ends":
            assert torch.equal(got, prefix_lens), "a path for nobody commits nothing"
        else:
            assert (got == (-1 if field.name == "targets" else 0)).all(), "a path for nobody moves nothing"


@settings(max_examples=15, deadline=None)
@given(case=drafts(), seed=st.integers(0, 2**32 - 1), narrower=st.integers(0, 3))
def test_triton_stages_what_torch_stages(case, seed, narrower):
    ids, log_probs, budget = case
    tree = T.build_trees_torch(roots_of(ids), ids, log_probs, budget).first(max(1, budget + 1 - narrower))
    _, prefix_lens = window_of(tree, seed)

    def staged(stage, where: str) -> list[torch.Tensor]:
        rows = tree.tokens.numel()
        words = torch.full((rows + 3, tree.words.shape[2] + 1), 7, dtype=torch.int32, device=where)
        parents = torch.full((rows + 3,), 7, dtype=torch.int32, device=where)
        moved = T.DraftTree(*(part.to(where) for part in tree.parts()))
        return [*stage(moved, prefix_lens.to(where), words, parents), words, parents]

    for expected, got in zip(staged(T.stage, "cpu"), staged(kernels.stage, DEVICE), strict=True):
        assert torch.equal(got.cpu(), expected)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 40), st.integers(2, 9), st.integers(0, 2**32 - 1))
def test_triton_opens_the_window_that_torch_opens(batch, width, block, seed):
    rng = np.random.default_rng(seed)
    table = torch.from_numpy(rng.integers(1, 10_000, size=(8, 128)).astype(np.int32))
    rows = torch.from_numpy(rng.permutation(8)[:batch])
    roots = torch.from_numpy(rng.integers(0, 32, size=batch))
    prefix_lens = torch.from_numpy(rng.integers(0, 128 - 40, size=batch))
    expected = T.open_window(roots, prefix_lens, rows, table, width=width, block=block, mask_token=31)
    arguments = (tensor.to(DEVICE) for tensor in (roots, prefix_lens, rows, table))
    got = kernels.open_window(*arguments, width, block, 31)
    for field in dataclasses.fields(T.Window):
        assert torch.equal(getattr(got, field.name).cpu(), getattr(expected, field.name)), field.name
    assert torch.equal(expected.slots[0], table[rows[0], prefix_lens[0] : prefix_lens[0] + width].long())
    assert expected.block_ids[0].tolist() == [int(roots[0]), *[31] * (block - 1)]

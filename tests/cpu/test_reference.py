"""The PyTorch reference against a definition written with loops, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.attention.reference import HEAD_DIM, LATENT_DIM, mask_words, mla_attention, pack_mask, unpack_mask

SCALE = 1 / math.sqrt(192)


def random_tree(q_len: int, generator: torch.Generator) -> torch.Tensor:
    """Visibility `[q, q]` of a random tree in which a parent comes before its children."""
    visible = torch.zeros(q_len, q_len, dtype=torch.bool)
    for node in range(q_len):
        if node:
            visible[node] = visible[int(torch.randint(node, (1,), generator=generator))]
        visible[node, node] = True
    return visible


class Case:
    """A random paged batch: requests of different lengths over scattered slots."""

    def __init__(
        self, seed: int, lens: list[int], q_lens: list[int], heads: int, page: int, dtype: torch.dtype
    ) -> None:
        g = torch.Generator().manual_seed(seed)
        pages = [-(-n // page) for n in lens]
        order = torch.randperm(sum(pages) + 3, generator=g)
        self.pool = torch.randn((sum(pages) + 3) * page, HEAD_DIM, generator=g).to(dtype)
        self.req_to_token = torch.zeros(len(lens) + 2, max([*lens, 1]) + page, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 2, generator=g)[: len(lens)]
        taken = 0
        for row, n, count in zip(self.rows, lens, pages, strict=True):
            slots = (order[taken : taken + count, None] * page + torch.arange(page)).flatten()[:n]
            self.req_to_token[row, :n] = slots.int()
            taken += count
        self.lens, self.q_lens = torch.tensor(lens, dtype=torch.int32), q_lens
        self.indptr = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32)
        self.q = torch.randn(sum(q_lens), heads, HEAD_DIM, generator=g)
        self.trees = [random_tree(n, g) for n in q_lens]

    def packed_trees(self) -> torch.Tensor:
        words = mask_words(max(self.q_lens))
        return torch.cat([torch.nn.functional.pad(pack_mask(t), (0, words - mask_words(len(t)))) for t in self.trees])

    def run(self, dtype: torch.dtype, tree: bool, **options) -> tuple[torch.Tensor, torch.Tensor]:
        return mla_attention(
            self.q.to(dtype),
            self.pool,
            self.req_to_token,
            self.rows,
            self.lens,
            qo_indptr=self.indptr,
            sm_scale=SCALE,
            tree_mask=self.packed_trees() if tree else None,
            compute_dtype=dtype,
            **options,
        )

    def by_definition(self, tree: bool, cap: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One softmax a (row, head), written out."""
        out = torch.zeros(*self.q.shape[:2], LATENT_DIM, dtype=torch.float64)
        lse = torch.zeros(self.q.shape[:2], dtype=torch.float64)
        for b, (n, q_len) in enumerate(zip(self.lens.tolist(), self.q_lens, strict=True)):
            kv = self.pool[self.req_to_token[self.rows[b], :n].long()].double()
            for i in range(q_len):
                seen = [
                    j
                    for j in range(n)
                    if j < n - q_len or (self.trees[b][i, j - n + q_len] if tree else j <= n - q_len + i)
                ]
                for h in range(self.q.shape[1]):
                    t = int(self.indptr[b]) + i
                    logits = kv[seen] @ self.q[t, h].double() * SCALE
                    if cap:
                        logits = cap * torch.tanh(logits / cap)
                    lse[t, h] = torch.logsumexp(logits, 0)
                    out[t, h] = torch.softmax(logits, 0) @ kv[seen, :LATENT_DIM]
        return out, lse


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), min_size=1, max_size=4),
    heads=st.sampled_from([1, 3]),
    page=st.sampled_from([1, 4, 64]),
    tree=st.booleans(),
    cap=st.sampled_from([0.0, 5.0]),
)
def test_matches_definition(seed, shapes, heads, page, tree, cap):
    case = Case(seed, [p + q for p, q in shapes], [q for _, q in shapes], heads, page, torch.float32)
    out, lse = case.run(torch.float64, tree, logit_cap=cap)
    want_out, want_lse = case.by_definition(tree, cap)
    torch.testing.assert_close(out, want_out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, want_lse, rtol=1e-10, atol=1e-10)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 129), st.integers(0, 2**31))
def test_mask_packing_round_trips(q_len, seed):
    mask = torch.rand(3, q_len, generator=torch.Generator().manual_seed(seed)) < 0.5
    words = pack_mask(mask)
    assert words.dtype == torch.int32 and words.shape == (3, mask_words(q_len))
    assert torch.equal(unpack_mask(words, q_len), mask)


def test_causal_is_the_chain_tree():
    case = Case(1, [30, 7], [5, 3], 2, 1, torch.float32)
    case.trees = [torch.ones(n, n, dtype=torch.bool).tril() for n in case.q_lens]
    assert torch.equal(case.run(torch.float32, tree=True)[0], case.run(torch.float32, tree=False)[0])


@pytest.mark.parametrize("page", [1, 64])
def test_tree_rows_equal_their_own_path_decoded_alone(page):
    """Verifying a tree is the same as decoding each root-to-node path on its own."""
    case = Case(3, [50], [9], 4, page, torch.float32)
    out, _ = case.run(torch.float64, tree=True)
    slots = case.req_to_token[case.rows[0], :50]
    for node in range(9):
        path = case.trees[0][node].nonzero().flatten()
        table = torch.cat([slots[:41], slots[41:][path]])[None]
        alone, _ = mla_attention(
            case.q[node : node + 1].double(),
            case.pool,
            table,
            torch.tensor([0]),
            torch.tensor([table.shape[1]]),
            q_len=1,
            sm_scale=SCALE,
            compute_dtype=torch.float64,
        )
        torch.testing.assert_close(out[node : node + 1], alone, rtol=1e-10, atol=1e-10)


def test_padded_requests_give_zero_and_minus_infinity():
    case = Case(4, [12, 12], [1, 1], 2, 1, torch.float32)
    case.lens[1] = 0
    out, lse = case.run(torch.float32, tree=False)
    assert (out[1] == 0).all() and (lse[1] == float("-inf")).all() and torch.isfinite(lse[0]).all()


def test_fp8_kv_is_scaled_on_read():
    case = Case(5, [40], [3], 2, 1, torch.float32)
    want, _ = case.run(torch.float64, tree=True)
    case.pool = (case.pool / 0.5).to(torch.float8_e4m3fn)
    out, _ = case.run(torch.float32, tree=True, kv_scale=0.5)
    assert (out.double() - want).norm() / want.norm() < 0.05


def test_slots_outside_the_request_are_never_read():
    case = Case(6, [20, 33], [2, 4], 2, 1, torch.float32)
    want, _ = case.run(torch.float32, tree=True)
    used = torch.cat([case.req_to_token[r, :n] for r, n in zip(case.rows, case.lens, strict=True)]).long()
    poison = torch.full_like(case.pool, float("nan"))
    poison[used] = case.pool[used]
    case.pool = poison
    assert torch.equal(case.run(torch.float32, tree=True)[0], want)

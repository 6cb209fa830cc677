"""The kernels against float64 on a GPU: shapes, trees, layouts, dtypes, padding, graphs, determinism, poison."""

from __future__ import annotations

import itertools
import math

import bundles
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device for tests (docs/CONTRIBUTING.md)", allow_module_level=True)

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from reference import random_tree  # noqa: E402
from sglang_sm120 import ops  # noqa: E402

if not ops.LIBRARY_PATH.exists():
    pytest.skip("the kernels are not built here: run `make kernels`", allow_module_level=True)

DEVICE = torch.device("cuda", 0)
SM_SCALE = 192**-0.5
FP8_SCALE = 0.037


class Problem:
    """Inputs of one call. Slots outside a request's KV are far out of range: touching one faults."""

    def __init__(
        self,
        heads: int,
        q_lens: list[int],
        kv_lens: list[int],
        *,
        tree: bool = False,
        fp8: bool = False,
        ragged: bool = False,
        layout: str = "scattered",
        page: int = 1,
        seed: int = 0,
    ) -> None:
        gen = torch.Generator(device=DEVICE).manual_seed(seed)
        rng = np.random.default_rng(seed)
        batch, rows = len(q_lens), sum(q_lens)
        pages = [-(-length // page) for length in kv_lens]
        slots = (sum(pages) + 3) * page
        values = torch.randn(slots, 576, device=DEVICE, generator=gen)
        self.kv = (values / FP8_SCALE).clamp(-448, 448).to(torch.float8_e4m3fn) if fp8 else values.bfloat16()
        self.kv_scale = FP8_SCALE if fp8 else 1.0
        order = {
            "scattered": lambda n: torch.randperm(n, device=DEVICE, generator=gen),
            "reversed": lambda n: torch.arange(n - 1, -1, -1, device=DEVICE),
            "contiguous": lambda n: torch.arange(n, device=DEVICE),
        }[layout](slots // page)
        self.table = torch.full((batch + 3, max(*kv_lens, 1) + page), 2**30, dtype=torch.int32, device=DEVICE)
        self.requests = torch.randperm(batch + 3, device=DEVICE, generator=gen)[:batch]
        taken = 0
        for row, length, count in zip(self.requests.tolist(), kv_lens, pages, strict=True):
            own = order[taken : taken + count, None] * page + torch.arange(page, device=DEVICE)
            self.table[row, :length] = own.flatten()[:length].int()
            taken += count
        self.kv_lens = torch.tensor(kv_lens, device=DEVICE, dtype=torch.int32)
        self.q_lens = q_lens
        self.q = torch.randn(rows, heads, 576, device=DEVICE, generator=gen).bfloat16()
        self.indptr = torch.tensor([0, *itertools.accumulate(q_lens)], device=DEVICE, dtype=torch.int32)
        self.ragged = ragged
        self.visible = None
        if tree:
            blocks = torch.zeros(rows, max(q_lens), dtype=torch.bool)
            for b, q_len in enumerate(q_lens):
                at = int(self.indptr[b])
                blocks[at : at + q_len, :q_len] = torch.from_numpy(random_tree(q_len, rng))
            self.visible = blocks.to(DEVICE)

    def arguments(self) -> dict[str, object]:
        return {
            "q": self.q, "kv_pool": self.kv, "req_to_token": self.table, "req_pool_indices": self.requests,
            "kv_lens": self.kv_lens, "q_len": None if self.ragged else self.q_lens[0],
            "qo_indptr": self.indptr if self.ragged else None, "sm_scale": SM_SCALE, "kv_scale": self.kv_scale,
            "tree_mask": None if self.visible is None else ops.pack_tree_mask(self.visible),
        }  # fmt: skip

    def expected(self, dtype: torch.dtype = torch.float64, logit_cap: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 answer; with bfloat16, PyTorch's own bf16 attention (products, softmax and sums in bf16)."""
        rows, heads = self.q.shape[:2]
        out = torch.zeros(rows, heads, 512, dtype=torch.float64, device=DEVICE)
        lse = torch.full((rows, heads), -math.inf, dtype=torch.float64, device=DEVICE)
        for b, length in enumerate(self.kv_lens.tolist()):
            at, new = int(self.indptr[b]), min(self.q_lens[b], length)
            if new == 0:
                continue
            kv = (self.kv[self.table[self.requests[b], :length].long()].to(torch.float32) * self.kv_scale).to(dtype)
            seen = torch.ones(new, length, dtype=torch.bool, device=DEVICE)
            own = torch.ones(new, new, dtype=torch.bool, device=DEVICE).tril()
            seen[:, length - new :] = own if self.visible is None else self.visible[at : at + new, :new]
            logits = torch.einsum("qhd,kd->qhk", self.q[at : at + new].to(dtype), kv) * SM_SCALE
            if logit_cap:
                logits = logit_cap * torch.tanh(logits / logit_cap)
            logits = logits.masked_fill(~seen[:, None], -math.inf)
            lse[at : at + new] = torch.logsumexp(logits, dim=-1).double()
            weights = torch.softmax(logits, dim=-1).nan_to_num(0.0)
            out[at : at + new] = torch.einsum("qhk,kd->qhd", weights, kv[:, :512]).double()
        return out, lse

    def run(self, **extra: object) -> tuple[torch.Tensor, torch.Tensor]:
        """The flash kernel into poisoned outputs with a poisoned workspace: nothing unwritten or unset may show."""
        out = torch.full((*self.q.shape[:2], 512), math.nan, device=DEVICE, dtype=torch.bfloat16)
        lse = torch.full(self.q.shape[:2], math.nan, device=DEVICE)
        workspace = ops.new_workspace(DEVICE).fill_(0xFF)
        ops.mla_verify(**self.arguments(), **extra, out=out, lse=lse, workspace=workspace)
        return out, lse


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def assert_close(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    (out, lse), (want_out, want_lse) = got, want
    assert torch.isfinite(out).all()
    assert relative_error(out, want_out) < bundles.MAX_RELATIVE_ERROR
    finite = torch.isfinite(want_lse)
    assert torch.equal(torch.isneginf(lse), ~finite)
    if finite.any():
        assert (lse.double() - want_lse)[finite].abs().max() < bundles.MAX_LSE_ERROR


@pytest.mark.parametrize("case", bundles.CASES, ids=lambda c: c.name)
@pytest.mark.parametrize("kernel", [ops.mla_verify, ops.mla_oracle], ids=["flash", "oracle"])
def test_reference_bundles(case: bundles.BundleCase, kernel: object) -> None:
    data = {
        name: torch.from_numpy(array).to(DEVICE) for name, array in bundles.make(case).items() if name != "tree_mask"
    }
    words = torch.from_numpy(bundles.make(case)["tree_mask"].view(np.int32)).to(DEVICE)
    uniform = len(set(case.q_lens)) == 1
    out, lse = kernel(
        data["q"].view(torch.bfloat16), data["kv"].view(torch.float8_e4m3fn if case.fp8 else torch.bfloat16),
        data["req_to_token"], data["req_pool_indices"], data["kv_lens"], q_len=case.q_lens[0] if uniform else None,
        qo_indptr=None if uniform else data["qo_indptr"], tree_mask=words, sm_scale=case.sm_scale,
        kv_scale=float(data["kv_scale"][0]), logit_cap=case.logit_cap,
    )  # fmt: skip
    assert_close((out, lse), (data["out"].double(), data["lse"].double()))


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_random_shapes_and_trees(data: st.DataObject) -> None:
    heads = data.draw(st.sampled_from([1, 2, 5, 8, 12, 16, 20, 64, 128]), "heads")
    batch = data.draw(st.integers(1, 12), "batch")
    ragged = data.draw(st.booleans(), "ragged")
    longest = max(1, min(129, 4200 // heads))
    q_lens = data.draw(
        st.lists(st.integers(1, longest), min_size=batch, max_size=batch)
        if ragged
        else st.integers(1, longest).map(lambda q: [q] * batch),
        "q_lens",
    )
    kv_lens = [data.draw(st.sampled_from([0, q, q + 1, q + 15, q + 16, q + 700, 3000])) for q in q_lens]
    problem = Problem(
        heads, q_lens, kv_lens, ragged=ragged, tree=data.draw(st.booleans(), "tree"),
        fp8=data.draw(st.booleans(), "fp8"),
        layout=data.draw(st.sampled_from(["scattered", "reversed", "contiguous"]), "layout"),
        page=data.draw(st.sampled_from([1, 2, 16, 64]), "page"), seed=data.draw(st.integers(0, 2**31), "seed"),
    )  # fmt: skip
    assert_close(problem.run(), problem.expected())


def test_error_no_larger_than_torch_bf16_attention() -> None:
    problem = Problem(8, [9, 9], [5000, 777], tree=True)
    want, want_lse = problem.expected()
    out, lse = problem.run()
    own = relative_error(out, want)
    torch_error = relative_error(problem.expected(torch.bfloat16)[0].bfloat16(), want)
    assert own <= torch_error, (own, torch_error)
    assert (lse.double() - want_lse).abs().max() < bundles.MAX_LSE_ERROR


def test_long_context_and_wide_batch() -> None:
    for problem in (
        Problem(8, [9], [185_000], tree=True),
        Problem(8, [1] * 256, [int(n) for n in np.random.default_rng(1).integers(0, 2000, 256)]),
        Problem(8, [700, 33], [3000, 33], ragged=True),
        Problem(8, [300, 300], [1000, 300]),
        Problem(64, [129], [4000], tree=True),
    ):
        assert_close(problem.run(), problem.expected())


def test_a_million_tokens() -> None:
    problem = Problem(8, [9], [1_000_000], fp8=True)
    assert_close(problem.run(), problem.expected())


def test_references_that_rise_steeply_are_exact() -> None:
    """Keys sorted by rising score: the lazily moved reference has to move in nearly every tile."""
    problem = Problem(8, [1], [2000], layout="contiguous")
    direction = problem.q[0, 0].float()
    growth = torch.linspace(-3, 3, problem.kv.shape[0], device=DEVICE)[:, None]
    problem.kv = (problem.kv.float() + growth * direction).bfloat16()
    assert_close(problem.run(), problem.expected())


def test_soft_cap() -> None:
    problem = Problem(8, [9], [700], tree=True)
    assert_close(problem.run(logit_cap=20.0), problem.expected(logit_cap=20.0))


def test_duplicated_prefix() -> None:
    """Two requests that share their prefix slots get what each would get alone."""
    problem = Problem(8, [9, 9], [600, 600])
    first, second = problem.requests.tolist()
    problem.table[second, :500] = problem.table[first, :500]
    assert_close(problem.run(), problem.expected())


def test_two_runs_are_bit_identical() -> None:
    problem = Problem(8, [33, 33], [18_500, 777], tree=True)
    first, second = problem.run(), problem.run()
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_latents_of_any_magnitude() -> None:
    """Latents 2**power times as large, queries as much smaller: outputs follow, bit for bit."""
    problem, scaled = Problem(8, [9], [5000]), Problem(8, [9], [5000])
    want, want_lse = problem.run()
    for power in (-90, -30, 30, 90):
        scaled.q = (problem.q.float() * 2.0**-power).bfloat16()
        scaled.kv = (problem.kv.float() * 2.0**power).bfloat16()
        out, lse = scaled.run()
        assert torch.equal(out.float(), want.float() * 2.0**power) and torch.equal(lse, want_lse)


@pytest.mark.parametrize("q_len", [1, 9, 33])
def test_captured_graph_serves_other_lengths(q_len: int) -> None:
    """Captured with padded requests, replayed at lengths it never saw: the eager result, bit for bit."""
    problem = Problem(8, [q_len] * 4, [5000, 3000, 700, 4000], tree=True)
    arguments, lengths = problem.arguments(), problem.kv_lens.clone()
    out, lse = (
        torch.empty(4 * q_len, 8, 512, device=DEVICE, dtype=torch.bfloat16),
        torch.empty(4 * q_len, 8, device=DEVICE),
    )
    workspace = ops.new_workspace(DEVICE)
    problem.kv_lens.copy_(torch.tensor([1, 0, 0, 0]))
    graph = torch.cuda.CUDAGraph()
    ops.mla_verify(**arguments, out=out, lse=lse, workspace=workspace)
    with torch.cuda.graph(graph):
        ops.mla_verify(**arguments, out=out, lse=lse, workspace=workspace)
    for lens in (lengths.tolist(), [q_len, 2999, 0, 17], [0, 0, 0, 0]):
        problem.kv_lens.copy_(torch.tensor(lens))
        out.fill_(math.nan)
        graph.replay()
        eager = problem.run()
        assert torch.equal(out, eager[0]) and torch.equal(lse, eager[1])


def test_rows_past_the_batch_are_defined() -> None:
    problem = Problem(8, [3, 4], [50, 60], ragged=True)
    problem.indptr.copy_(torch.tensor([0, 3, 5]))
    out, lse = problem.run()
    assert not out[5:].any() and torch.isneginf(lse[5:]).all()


def test_wrong_arguments_name_themselves() -> None:
    good = Problem(8, [3], [50]).arguments()
    for name, bad, message in (
        ("q", good["q"].half(), "q is torch.float16"),
        ("q", good["q"][..., :512].contiguous(), "must be \\[T, H, 576\\]"),
        ("kv_pool", good["kv_pool"].float(), "kv_pool is torch.float32"),
        ("req_to_token", good["req_to_token"].long(), "req_to_token is torch.int64"),
        ("kv_lens", good["kv_lens"].cpu(), "kv_lens is on cpu"),
        ("q_len", 4, "q has 3 rows for 1 requests of q_len 4"),
        ("q_len", None, "exactly one of q_len and qo_indptr"),
        ("workspace", torch.empty(64, dtype=torch.uint8, device=DEVICE), "workspace must have"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.mla_verify(**{**good, name: bad})


def test_debug_mode_finds_a_slot_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(8, [3], [50])
    problem.table[problem.requests[0], 7] = problem.kv.shape[0]
    monkeypatch.setenv("SGLANG_SM120_CHECK_SLOTS", "1")
    with pytest.raises(ValueError, match="request 0 token 7 has slot"):
        problem.run()


@pytest.mark.parametrize("lists", [0, 1, 7])
@pytest.mark.parametrize("rows", [1, 50, 900, 3000])
def test_move_kv_is_safe_where_source_and_target_overlap(rows: int, lists: int) -> None:
    layers, row_bytes, stride = 5, 1152, 2 * rows + 10
    slots = stride * max(lists, 1)
    pools = [torch.randint(0, 255, (slots, row_bytes), dtype=torch.uint8, device=DEVICE) for _ in range(layers)]
    before = [pool.clone() for pool in pools]
    pointers = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64, device=DEVICE)
    src = torch.arange(rows, device=DEVICE)
    dst = torch.arange(rows, device=DEVICE).roll(1) + 1
    dst[::7] = -1
    if lists:
        base = stride * torch.arange(lists, device=DEVICE)[:, None]
        src, dst = base + src, torch.where(dst < 0, -1, base + dst)
    ops.move_kv(pointers, row_bytes, src, dst)
    kept = dst >= 0
    for pool, old in zip(pools, before, strict=True):
        want = old.clone()
        want[dst[kept]] = old[src[kept]]
        assert torch.equal(pool, want)


@pytest.mark.parametrize("q_len", [1, 31, 32, 33, 129])
def test_pack_tree_mask(q_len: int) -> None:
    from sglang_sm120.attention.reference import pack_mask

    mask = torch.rand(7, q_len, device=DEVICE) < 0.5
    assert torch.equal(ops.pack_tree_mask(mask), pack_mask(mask))

"""The numpy definition against the overlay's PyTorch reference, and the bundles' own consistency. No GPU needed."""

from __future__ import annotations

import bundles
import numpy as np
import pytest
import reference

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("case", [c for c in bundles.CASES if c.heads < 64], ids=lambda c: c.name)
def test_numpy_and_torch_references_agree(case: bundles.BundleCase) -> None:
    from sglang_sm120.attention.reference import mla_attention

    data = bundles.make(case)
    kv = torch.from_numpy(data["kv"]).view(torch.float8_e4m3fn if case.fp8 else torch.bfloat16).double()
    out, lse = mla_attention(
        torch.from_numpy(data["q"]).view(torch.bfloat16).double(),
        kv,
        *(torch.from_numpy(data[name]) for name in ("req_to_token", "req_pool_indices", "kv_lens")),
        qo_indptr=torch.from_numpy(data["qo_indptr"]),
        sm_scale=case.sm_scale,
        tree_mask=torch.from_numpy(data["tree_mask"].view(np.int32)),
        logit_cap=case.logit_cap,
        kv_scale=float(data["kv_scale"][0]),
        compute_dtype=torch.float64,
    )
    np.testing.assert_allclose(out.numpy(), data["out"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(lse.numpy(), data["lse"], rtol=1e-6, atol=1e-6)


def test_bundles_are_reproducible() -> None:
    first, second = bundles.make(bundles.CASES[2]), bundles.make(bundles.CASES[2])
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_tree_mask_words_match_their_bits() -> None:
    visible = reference.random_tree(40, np.random.default_rng(0))
    words = reference.pack_words(visible)
    assert words.shape == (40, 2)
    for i, j in ((39, 39), (39, 0), (5, 33)):
        assert bool(words[i, j // 32] >> np.uint32(j % 32) & 1) == visible[i, j]


def test_padded_requests_give_zero_and_minus_infinity() -> None:
    data = bundles.make(next(c for c in bundles.CASES if c.name == "padded"))
    assert not data["out"][:9].any()
    assert np.isneginf(data["lse"][:9]).all()
    assert np.isfinite(data["lse"][9:18]).all()

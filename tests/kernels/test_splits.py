"""The launch fills the GPU at batch 1, whatever is asked: verify without splits is why long contexts were slow."""

from __future__ import annotations

import pytest
from sglang_sm120 import ops

SMALLEST_ROW_TILE = 48


@pytest.mark.skipif(not ops.LIBRARY_PATH.exists(), reason="the kernels are not built here: run `make kernels`")
@pytest.mark.parametrize("sms", [70, 132, 170, 188])
@pytest.mark.parametrize("heads", [8, 16, 64])
@pytest.mark.parametrize("q_len", [1, 2, 8, 16, 17, 33, 65])
def test_one_request_gets_the_whole_gpu(q_len, heads, sms):
    """`splits` blocks for each row tile. With larger tiles there are fewer of them, and more splits."""
    row_tiles = -(-q_len * heads // SMALLEST_ROW_TILE)
    assert ops._library().sm120_mla_splits(q_len, heads, sms) * row_tiles >= 0.75 * sms

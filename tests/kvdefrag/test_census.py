"""Counting runs, against loops."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.kvdefrag import census
from sglang_sm120.kvdefrag.census import Runs


def loop_runs(ids: list[int]) -> int:
    return sum(i == 0 or ids[i] != ids[i - 1] + 1 for i in range(len(ids)))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 9), st.lists(st.integers(0, 12), max_size=6), st.randoms(use_true_random=False)
)
def test_counts_equal_loops(pool, block, sizes, random):
    ids = random.sample(range(1, pool + 1), pool) if random.random() < 0.5 else list(range(1, pool + 1))
    requests, at = [], 0
    for size in sizes:
        requests.append(ids[at : at + size])
        at += size
    free = ids[at:]
    random.shuffle(free)
    got = census.take(
        [torch.tensor(r, dtype=torch.int32) for r in requests], torch.tensor(free, dtype=torch.int64), pool, block
    )
    assert [r.runs for r in got.requests] == [loop_runs(r) for r in requests]
    assert [r.units for r in got.requests] == [len(r) for r in requests]
    assert got.free == Runs(len(free), loop_runs(sorted(free)))
    lengths = [0]
    for i, slot in enumerate(sorted(free)):
        lengths.append(lengths[-1] + 1 if i and slot == sorted(free)[i - 1] + 1 else 1)
    assert got.largest_free_run == max(lengths)
    blocks = [[s in free for s in range(b, b + block)] for b in range(1, pool - block + 2, block)]
    assert got.partial_blocks == sum(0 < sum(b) < block for b in blocks)


def test_contiguity_spans_zero_to_one():
    assert Runs(10, 1).contiguity == 1 and Runs(10, 10).contiguity == 0 and Runs(1, 1).contiguity == 1
    assert Runs(12, 3).mean_length == 4 and Runs(0, 0).mean_length == 0

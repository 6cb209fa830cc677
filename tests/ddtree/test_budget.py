"""The width policy on made-up costs and acceptances."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.ddtree.budget import PROBE_SHARE, StepCosts, WidthPolicy, offered_widths

WIDTHS = [1, 8, 9, 17, 33, 65]


def costs(per_node: float, per_token: float = 0.0) -> StepCosts:
    return StepCosts({w: {b: (1.0 + per_node * w * b, per_token) for b in (1, 4, 16)} for w in WIDTHS})


def run(policy: WidthPolicy, chance: list[float], steps: int, batch_size: int = 4, context: int = 1000, seed: int = 0):
    """Serve `steps` steps of requests whose node i is accepted with probability chance[i]; the widths chosen."""
    rng, chosen = random.Random(seed), []
    for _ in range(steps):
        width = policy.choose(batch_size, context)
        chosen.append(width)
        counts = [sum(rng.random() < chance[i] for _ in range(batch_size)) for i in range(width)]
        policy.observe(width, counts, batch_size)
    return chosen


def test_offered_widths_are_few_and_cover_block_and_budget():
    assert offered_widths(8, 65) == [1, 8, 9, 17, 33, 65]
    assert offered_widths(16, 33) == [1, 16, 17, 33]
    assert offered_widths(8, 8) == [1, 8]


def test_falls_to_no_speculation_when_nothing_is_accepted():
    policy = WidthPolicy(WIDTHS, costs(per_node=0.01))
    chosen = run(policy, [0.0] * 65, 2000)
    assert set(chosen[-200:]) <= {1, 65} and chosen[-200:].count(1) > 195


def test_takes_the_widest_tree_when_width_is_free():
    policy = WidthPolicy(WIDTHS, costs(per_node=0.0))
    assert run(policy, [0.9**i for i in range(65)], 300)[-1] == 65


def test_larger_batches_get_narrower_trees():
    chance = [0.8**i for i in range(65)]
    picks = []
    for batch_size in (1, 4, 16):
        policy = WidthPolicy(WIDTHS, costs(per_node=0.05))
        picks.append(run(policy, chance, 500, batch_size)[-1])
    assert picks == sorted(picks, reverse=True) and picks[0] > picks[-1]


def test_comes_back_when_drafts_get_good_again():
    policy = WidthPolicy(WIDTHS, costs(per_node=0.002))
    assert run(policy, [0.0] * 65, 1000)[-1] == 1
    assert run(policy, [0.9**i for i in range(65)], 4000)[-1] > 8


@pytest.mark.xfail(
    reason="known shortfall: where a probe costs several plain steps, 800 steps teach too little and a good tree is "
    "left unused (per_node 0.0625, decay 0.875, batch 5: 14% slower than the best width)"
)
@settings(max_examples=10, deadline=None)
@given(st.floats(0.0, 0.2), st.floats(0.1, 0.95), st.integers(1, 16), st.integers(0, 200_000))
def test_close_to_the_best_fixed_width(per_node, decay, batch_size, context):
    """After learning, at most 3% fewer tokens per second than the best width, probes included."""
    chance = [decay**i for i in range(65)]
    policy = WidthPolicy(WIDTHS, costs(per_node, per_token=1e-6))
    run(policy, chance, 800, batch_size, context)
    chosen = run(policy, chance, 600, batch_size, context, seed=1)

    def speed(widths):
        tokens = sum(1 + sum(chance[1:w]) for w in widths)
        return tokens / sum(policy.costs.estimate(w, batch_size, context) for w in widths)

    assert speed(chosen) >= 0.97 * max(speed([w]) for w in WIDTHS)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 0.5), st.floats(0.0, 0.9))
def test_probing_stays_within_its_share(per_node, decay):
    policy = WidthPolicy(WIDTHS, costs(per_node))
    policy.hits = [decay**i for i in range(65)]
    spent = extra = 0.0
    for _ in range(3000):
        best = max(WIDTHS, key=lambda w: policy.tokens_per_second(w, 4, 0))
        width = policy.choose(4, 0)
        spent += policy.costs.estimate(best, 4, 0)
        extra += max(0.0, policy.costs.estimate(width, 4, 0) - policy.costs.estimate(best, 4, 0))
    assert extra <= PROBE_SHARE * spent + 1e-6


@pytest.mark.parametrize("batch_size, size", [(1, 1), (2, 4), (16, 16), (40, 16)])
def test_cost_takes_the_next_measured_batch(batch_size, size):
    table = StepCosts({8: {b: (float(b), 0.5) for b in (1, 4, 16)}})
    assert table.estimate(8, batch_size, 10) == size + 5.0

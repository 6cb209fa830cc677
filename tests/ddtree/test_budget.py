"""The width policy on made-up costs, trees and acceptances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.ddtree.budget import PROBE_SHARE, Belief, StepCosts, WidthPolicy, offered_widths

WIDTHS = [1, 8, 9, 17, 33, 65]


def costs(per_node: float, per_token: float = 0.0) -> StepCosts:
    return StepCosts({w: {b: (1.0 + per_node * w * b, per_token) for b in (1, 4, 16)} for w in WIDTHS})


class Traffic:
    """Requests whose trees have nodes of probability `decay ** i`, jittered, accepted with `trust * p ** bend`."""

    def __init__(self, decay: float, trust: float = 1.0, bend: float = 1.0, batch_size: int = 4, seed: int = 0) -> None:
        self.decay, self.trust, self.bend, self.batch_size = decay, trust, bend, batch_size
        self._rng = np.random.default_rng(seed)

    def trees(self, count: int) -> np.ndarray:
        jitter = self._rng.lognormal(0.0, 0.3, size=(count, max(WIDTHS)))
        return -np.sort(-np.minimum(1.0, self.decay ** np.arange(max(WIDTHS)) * jitter), axis=1)

    def chances(self, trees: np.ndarray) -> np.ndarray:
        return np.minimum(1.0, self.trust * trees**self.bend)

    def serve(self, policy: WidthPolicy, steps: int, context: int = 1000) -> list[int]:
        """The widths chosen over so many steps."""
        chosen = []
        for _ in range(steps):
            width = policy.choose(self.batch_size, context)
            trees = self.trees(self.batch_size)
            accepted = self._rng.random(trees.shape) < self.chances(trees)
            if width > 1:
                policy.observe(width, trees, accepted)
            else:
                policy.pass_over(self.batch_size)
            chosen.append(width)
        return chosen

    def tokens(self) -> dict[int, float]:
        """Expected tokens a request and step, by width."""
        chance = self.chances(self.trees(4000)).mean(0)
        return {width: 1 + chance[1:width].sum() for width in WIDTHS}


def test_offered_widths_are_few_and_cover_block_and_budget():
    assert offered_widths(8, 65) == [1, 8, 9, 17, 33, 65]
    assert offered_widths(16, 33) == [1, 16, 17, 33]
    assert offered_widths(8, 8) == [1, 8]


def test_falls_to_no_speculation_when_nothing_is_accepted():
    chosen = Traffic(0.9, trust=0.0).serve(WidthPolicy(WIDTHS, costs(per_node=0.01)), 2000)
    assert set(chosen[-200:]) <= {1, 8} and chosen[-200:].count(1) > 150


def test_takes_the_widest_tree_when_width_is_free():
    assert Traffic(0.9).serve(WidthPolicy(WIDTHS, costs(per_node=0.0)), 300)[-1] == 65


def test_larger_batches_get_narrower_trees():
    picks = []
    for batch_size in (1, 4, 16):
        chosen = Traffic(0.8, batch_size=batch_size).serve(WidthPolicy(WIDTHS, costs(per_node=0.05)), 500)
        picks.append(np.median(chosen[-100:]))
    assert picks == sorted(picks, reverse=True) and picks[0] > picks[-1]


def test_comes_back_when_drafts_get_good_again():
    policy = WidthPolicy(WIDTHS, costs(per_node=0.002))
    assert Traffic(0.9, trust=0.0).serve(policy, 1000)[-1] in (1, 8)
    assert np.median(Traffic(0.9).serve(policy, 4000)[-100:]) > 8


@settings(max_examples=60, deadline=None)
@given(
    per_node=st.floats(0.0, 0.2),
    decay=st.floats(0.1, 0.95),
    trust=st.floats(0.0, 2.0),
    bend=st.floats(0.5, 2.0),
    batch_size=st.integers(1, 16),
    context=st.integers(0, 200_000),
)
def test_close_to_the_best_fixed_width(per_node, decay, trust, bend, batch_size, context):
    """After learning, at most 3% slower than the best width, probes included, however wrong the drafter's figures."""
    traffic = Traffic(decay, trust, bend, batch_size)
    policy = WidthPolicy(WIDTHS, costs(per_node, per_token=1e-6))
    traffic.serve(policy, 800, context)
    chosen, tokens = traffic.serve(policy, 600, context), traffic.tokens()

    def speed(widths: list[int]) -> float:
        seconds = sum(policy.costs.estimate(w, batch_size, context) for w in widths)
        return sum(tokens[w] for w in widths) / seconds

    assert speed(chosen) >= 0.97 * max(speed([w]) for w in WIDTHS)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 0.5), st.floats(0.0, 0.9))
def test_probing_stays_within_its_share(per_node, decay):
    policy = WidthPolicy(WIDTHS, costs(per_node))
    Traffic(decay).serve(policy, 80)
    policy._debt_seconds = 0.0
    spent = extra = 0.0
    for _ in range(1000):
        best = max(WIDTHS, key=lambda w: policy.tokens_per_second(w, 4, 0))
        width = policy.choose(4, 0)
        spent += policy.costs.estimate(best, 4, 0)
        extra += max(0.0, policy.costs.estimate(width, 4, 0) - policy.costs.estimate(best, 4, 0))
    assert extra <= PROBE_SHARE * spent + 1e-6


def test_belief_learns_each_halving_and_guesses_the_next():
    belief, rng = Belief(), np.random.default_rng(0)
    for _ in range(200):
        probabilities = rng.uniform(0.1, 1.0, size=(4, 8))
        belief.learn(probabilities, rng.random((4, 8)) < probabilities**2)
    assert belief.rates(np.array([0.9, 0.3, 0.15])) == pytest.approx([0.81, 0.09, 0.0225], rel=0.35)
    assert belief.rates(np.array([0.01]))[0] < 0.005, "far below what was seen, the last ratio seen holds"


@pytest.mark.parametrize("batch_size, expected", [(1, 1.0), (2, 2.0), (16, 16.0), (40, 40.0)])
def test_cost_is_a_line_between_measured_batches(batch_size, expected):
    table = StepCosts({8: {b: (float(b), 0.5) for b in (1, 4, 16)}})
    assert table.estimate(8, batch_size, 0) == pytest.approx(expected)
    assert table.estimate(8, 4, 10) == pytest.approx(9.0)


def test_no_width_is_cheaper_than_launching_it():
    table = StepCosts({1: {1: (1.0, 0.0)}, 8: {1: (2.0, 0.0)}, 32: {1: (5.0, 0.0)}})
    table.learn(False, 1.5, 1.0, is_host_bound=True)
    table.learn(True, 3.0, 2.0, is_host_bound=True)
    assert [table.estimate(width, 1, 0) for width in (1, 8, 32)] == pytest.approx([1.5, 3.0, 5.0], rel=0.02)


def test_what_the_device_takes_longer_than_measured_holds_for_all_widths_of_a_kind():
    table = StepCosts({1: {1: (1.0, 0.0)}, 8: {1: (2.0, 0.0)}, 32: {1: (5.0, 0.0)}})
    table.learn(True, 6.0, 5.0, is_host_bound=False)
    assert [table.estimate(width, 1, 0) for width in (1, 8, 32)] == pytest.approx([1.0, 2.4, 6.0], rel=0.02)
    table.learn(True, 3.0, 2.0, is_host_bound=True)
    table.learn(True, 2.0, 2.0, is_host_bound=False)
    assert table.estimate(8, 1, 0) == pytest.approx(2.0), "the host is known to launch one in this time"


def test_a_kind_that_a_busy_neighbour_made_slow_is_tried_again():
    """Steps without a draft were timed while others used the GPU; then those with one get fast again."""
    table = StepCosts({1: {1: (1.0, 0.0)}, 8: {1: (2.0, 0.0)}})
    table.learn(False, 3.0, 1.0, is_host_bound=False)
    table.learn(True, 6.0, 2.0, is_host_bound=False)
    table.learn(True, 5.5, 2.0, is_host_bound=False)
    assert table.estimate(1, 1, 0) > 2.9, "a little faster says little"
    table.learn(True, 2.2, 2.0, is_host_bound=False)
    assert table.estimate(1, 1, 0) == pytest.approx(3.0 * 2.2 / 5.5, rel=0.02), "as much faster as the other"
    assert table.estimate(8, 1, 0) == pytest.approx(2.2)


def test_a_host_that_sets_the_pace_shows_what_the_device_needs_at_most():
    table = StepCosts({1: {1: (1.0, 0.0)}, 8: {1: (2.0, 0.0)}, 32: {1: (5.0, 0.0)}})
    table.learn(True, 6.0, 2.0, is_host_bound=False)  # a busy moment: three times what was measured
    table.learn(True, 4.0, 2.0, is_host_bound=True)
    assert [table.estimate(width, 1, 0) for width in (8, 32)] == pytest.approx([4.0, 10.0])
    for _ in range(100):
        table.learn(True, 4.0, 2.0, is_host_bound=True)
    assert table.estimate(32, 1, 0) == pytest.approx(4.0), "and fades, for wider ones may be free"


def test_what_is_not_measured_fades():
    table = StepCosts({1: {1: (1.0, 0.0)}, 8: {1: (2.0, 0.0)}})
    table.learn(False, 3.0, 1.0, is_host_bound=False)
    for _ in range(400):
        table.learn(True, 2.2, 2.0, is_host_bound=False)
    assert table.estimate(1, 1, 0) < 0.5 and table.estimate(8, 1, 0) == pytest.approx(2.2)
    assert table.last_known(1, 1, 0) == pytest.approx(3.0), "what a probe may cost is counted by what was seen"

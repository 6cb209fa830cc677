"""The width policy on made-up costs, trees and acceptances."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_sm120.ddtree.budget import (
    TRIAL_SHARE,
    TRIAL_STEPS,
    TRIAL_STEPS_AT_FIRST,
    Belief,
    Pace,
    StepCosts,
    WidthPolicy,
    offered_widths,
)

WIDTHS = [1, 8, 17, 33, 65]


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

    def serve(
        self, policy: WidthPolicy, steps: int, context: int = 1000, factors: dict[int, float] | None = None
    ) -> list[int]:
        """The widths chosen over so many steps, which take the measured time, by the factor of each width if any."""
        chosen = []
        for _ in range(steps):
            width = policy.choose(self.batch_size, context)
            seconds = policy.costs.estimate(width, self.batch_size, context) * (factors or {}).get(width, 1.0)
            policy.learn(width, self.batch_size, context, seconds)
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
    assert offered_widths(8, 65) == [1, 8, 17, 33, 65]
    assert offered_widths(16, 33) == [1, 16, 33] and offered_widths(8, 33) == [1, 8, 17, 33]
    assert offered_widths(8, 8) == [1, 8]


def test_falls_to_no_speculation_when_nothing_is_accepted():
    chosen = Traffic(0.9, trust=0.0).serve(WidthPolicy(WIDTHS, costs(per_node=0.01)), 2000)
    assert chosen[-200:].count(1) > 150


def test_takes_the_widest_tree_when_width_is_free():
    assert Traffic(0.9).serve(WidthPolicy(WIDTHS, costs(per_node=0.0)), 600)[-200:].count(65) > 180


def test_larger_batches_get_narrower_trees():
    picks = []
    for batch_size in (1, 4, 16):
        chosen = Traffic(0.9, batch_size=batch_size).serve(WidthPolicy(WIDTHS, costs(per_node=0.02)), 500)
        picks.append(np.median(chosen[-100:]))
    assert picks == sorted(picks, reverse=True) and picks[0] > picks[-1]


def test_comes_back_when_drafts_get_good_again():
    policy = WidthPolicy(WIDTHS, costs(per_node=0.002))
    assert np.median(Traffic(0.9, trust=0.0).serve(policy, 1000)[-100:]) == 1
    assert np.median(Traffic(0.9).serve(policy, 4000)[-100:]) > 8


@settings(max_examples=30, deadline=None)
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
    chosen, tokens = traffic.serve(policy, 2000, context), traffic.tokens()

    seconds = {w: policy.costs.estimate(w, batch_size, context) for w in WIDTHS}

    def speed(widths: list[int]) -> float:
        took = sum(seconds[w] for w in widths)
        return sum(tokens[w] for w in widths) / took

    assert speed(chosen) >= 0.97 * max(speed([w]) for w in WIDTHS)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.0, 0.5), st.floats(0.0, 0.9))
def test_trials_stay_within_their_share(per_node, decay):
    """Of the time, and once at each load that is new."""
    policy, traffic = WidthPolicy(WIDTHS, costs(per_node)), Traffic(decay)
    traffic.serve(policy, 80)
    spent = lost = 0.0
    for _ in range(2000):
        tokens, seconds = policy.expected_tokens(), policy.expected_seconds(4, 1000)
        best = (tokens / seconds).argmax()
        at = WIDTHS.index(traffic.serve(policy, 1)[0])
        spent += seconds[at]
        lost += max(0.0, seconds[at] - tokens[at] / tokens[best] * seconds[best])
    dearest = TRIAL_STEPS * (policy.expected_seconds(4, 1000)).max()
    assert lost <= TRIAL_SHARE * spent + 1.1 * (TRIAL_STEPS_AT_FIRST * seconds.min() + dearest)


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
    assert table.estimate(8, batch_size, 10) == pytest.approx(expected + 5.0), "the context is that of all requests"


def speed(chosen: list[int], seconds: dict[int, float], tokens: dict[int, float]) -> float:
    return sum(tokens[width] for width in chosen) / sum(seconds[width] for width in chosen)


@pytest.mark.parametrize("per_node, decay", [(0.02, 0.7), (0.05, 0.7), (0.05, 0.85), (0.1, 0.9)])
def test_at_a_new_load_little_is_tried_that_will_not_pay(per_node, decay):
    """Its first 60 steps, once trials at other loads have shown that what was measured at start is right."""
    policy, traffic = WidthPolicy(WIDTHS, costs(per_node)), Traffic(decay)
    tokens, reached = traffic.tokens(), []
    for context in (250, 500, 1000, 4000, 16_000, 64_000, 256_000):
        seconds = {width: policy.costs.estimate(width, 4, context) for width in WIDTHS}
        first = traffic.serve(policy, 60, context)
        reached.append(speed(first, seconds, tokens) / max(tokens[width] / seconds[width] for width in WIDTHS))
        traffic.serve(policy, 240, context)
    assert np.mean(reached[3:]) > 0.88, "0.70 to 0.77 where all widths are tried"


@pytest.mark.parametrize("seed", range(6))
def test_figures_that_are_wrong_at_each_load_are_put_right(seed):
    """By a factor of e^0.3 or so for each width apart."""
    rng, traffic = np.random.default_rng(seed), Traffic(0.85, seed=seed)
    policy, tokens = WidthPolicy(WIDTHS, costs(0.02)), traffic.tokens()
    for context in (1000, 4000, 16_000, 64_000):
        factors = dict(zip(WIDTHS, rng.lognormal(0.0, 0.3, len(WIDTHS)), strict=True))
        seconds = {width: policy.costs.estimate(width, 4, context) * factors[width] for width in WIDTHS}
        traffic.serve(policy, 1000, context, factors)
        chosen = traffic.serve(policy, 2000, context, factors)
        assert speed(chosen, seconds, tokens) > 0.97 * max(tokens[width] / seconds[width] for width in WIDTHS)


def test_what_befalls_all_widths_is_told_by_one():
    pace = Pace.unknown(3)
    for at in (0, 1, 2) * 10:
        pace.learn(at, 0.0)
    for _ in range(40):
        pace.learn(1, 1.0)
    assert pace.mean == pytest.approx(np.ones(3), abs=0.1), "a busy neighbour"
    for _ in range(40):
        pace.learn(1, 0.0)
    assert pace.mean == pytest.approx(np.zeros(3), abs=0.1), "which has left"


def test_what_was_measured_wrong_of_one_width_is_told_by_that_one():
    pace = Pace.unknown(3)
    for at in (0, 2) * 20:
        pace.learn(at, 0.0)
    for _ in range(4):
        pace.learn(1, -1.1)
    assert pace.mean == pytest.approx([0.0, -1.1, 0.0], abs=0.15)


def test_one_odd_step_says_little():
    pace = Pace.unknown(2)
    for at in (0, 1) * 20:
        pace.learn(at, 0.0)
    pace.learn(0, 5.0)
    assert abs(pace.mean[0]) < 0.5 and abs(pace.mean[0] - pace.mean[1]) < 0.05


def test_what_does_not_run_gets_doubtful():
    pace = Pace.unknown(2)
    for at in (0, 1) * 20:
        pace.learn(at, 0.0)
    before = pace.doubt()
    for _ in range(1000):
        pace.learn(0, 0.0)
    assert pace.doubt()[0] == 0.0 and pace.doubt()[1] > 4 * before.max()

"""Which verify width pays: expected tokens per second, from the drafter's probabilities and measured step times.

A smaller best-first tree is the beginning of a larger one, and every draft builds the largest. So each step that drafts
shows what every width would have offered, verified or not: the probability of node i by the drafter. How far to believe
it is learned from the nodes that were verified, by halvings of probability; what holds for one halving is the first
guess for the next. A step of width w commits `1 + rate[1] + ... + rate[w - 1]` tokens a request on average. Width 1 is
no speculation. The width of the draft block is the smallest tree; it takes the chain's nodes wherever the drafter is
sure, at the chain's cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# Half of the weight is on the last so many requests that were verified, and for the trees' probabilities on the last
# so many that took a step; a step of 8 says more than a step of 1.
BELIEF_REQUESTS, TREE_REQUESTS = 512, 128
# The most that one step says about the trees of the next ones.
MAX_STEP_WEIGHT = 0.25
# Halvings of probability told apart, and how many expected hits the first guess for one weighs.
HALVINGS, GUESS_HITS = 12, 1.0
# So many requests are verified at the widest before anything is chosen.
FIRST_REQUESTS = 256
# How much of what is known of one kind of steps stays when the other is timed, and how much faster is a change.
FADE, SPED_UP = 0.99, 0.8
# Part of the time that may go to steps wider than the best one, to see how good its further nodes are now.
PROBE_SHARE = 0.005


@dataclass
class StepCosts:
    """Seconds of a whole step: `seconds[width][batch] = (at no context, more per context token of the batch)`.

    `timed`: of steps without a draft, and of those with one, the seconds that the host needs to launch one, and what a
    step takes on the device over what was measured, when last seen. `learned`: the same, but faded since.
    """

    seconds: dict[int, dict[int, tuple[float, float]]]
    timed: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 1.0), (0.0, 1.0)])
    learned: list[tuple[float, float]] = field(default_factory=lambda: [(0.0, 1.0), (0.0, 1.0)])

    def forget(self) -> None:
        """Let a step of either kind cost nothing, so that both are tried: a start-up is a busy moment to measure in."""
        self.timed, self.learned = [(0.0, 0.0), (0.0, 0.0)], [(0.0, 0.0), (0.0, 0.0)]

    def learn(self, drafts: bool, taken: float, expected: float, is_host_bound: bool) -> None:
        """From steps of one kind that took `taken` seconds each where the device should have needed `expected`.

        What the other kind costs fades, so that it is tried again before long; by as much as this kind got faster, if
        that is much, for whatever held it up held up the other too.
        """
        launching, scale = self.learned[drafts]
        known = max(launching, scale * expected)
        keep = min(FADE, taken / known) if taken < SPED_UP * known else FADE
        other_launching, other_scale = self.learned[not drafts]
        self.learned[not drafts] = (keep * other_launching, keep * other_scale)
        if is_host_bound:  # the device needs less than that
            self.learned[drafts] = (taken, min(FADE * scale, taken / expected))
        else:
            self.learned[drafts] = (min(launching, taken), taken / expected)
        self.timed[drafts] = self.learned[drafts]

    def on_device(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Device seconds of a step of `batch_size` requests with `context_tokens` in all.

        Between measured batch sizes a line, past the largest one its cost a request.
        """
        measured = self.seconds[width]
        sizes = sorted(measured)
        costs = [base + per_token * context_tokens for base, per_token in (measured[size] for size in sizes)]
        if batch_size > sizes[-1]:
            return costs[-1] * batch_size / sizes[-1]
        return float(np.interp(batch_size, sizes, costs))

    def estimate(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Seconds of a step, launching included; less than is known where that is long ago."""
        return self._seconds(self.learned[width > 1], width, batch_size, context_tokens)

    def last_known(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Seconds of a step as they were last seen."""
        return self._seconds(self.timed[width > 1], width, batch_size, context_tokens)

    def _seconds(self, figures: tuple[float, float], width: int, batch_size: int, context_tokens: int) -> float:
        launching, scale = figures
        return max(launching, scale * self.on_device(width, batch_size, context_tokens), 1e-9)


@dataclass
class Belief:
    """How often a node is accepted, over what the drafter says, for each halving of the probability it gives."""

    _hits: np.ndarray = field(init=False, default_factory=lambda: np.zeros(HALVINGS))
    _said: np.ndarray = field(init=False, default_factory=lambda: np.zeros(HALVINGS))

    def learn(self, probabilities: np.ndarray, accepted: np.ndarray) -> None:
        """From verified nodes `[B, n]`: the drafter's probability of each, and whether it was on the path."""
        fade = 0.5 ** (len(probabilities) / BELIEF_REQUESTS)
        at = _halving(probabilities).ravel()
        self._hits = fade * self._hits + np.bincount(at, accepted.ravel(), HALVINGS)
        self._said = fade * self._said + np.bincount(at, probabilities.ravel(), HALVINGS)

    def rates(self, probabilities: np.ndarray) -> np.ndarray:
        """Expected acceptance of nodes of any shape."""
        ratios, ratio = np.empty(HALVINGS), 1.0
        for at in range(HALVINGS):
            ratio = (self._hits[at] + GUESS_HITS * ratio) / (self._said[at] + GUESS_HITS)
            ratios[at] = ratio
        return np.minimum(1.0, probabilities * ratios[_halving(probabilities)])


def _halving(probabilities: np.ndarray) -> np.ndarray:
    """0 for probabilities above 1/2, 1 above 1/4, and so on."""
    halvings = -np.log2(np.maximum(probabilities, 0.5**HALVINGS))
    return np.minimum(halvings.astype(np.int64), HALVINGS - 1)


@dataclass
class WidthPolicy:
    """Chooses one of `widths` a step. Every input is the same on all ranks, and so is every choice."""

    widths: list[int]
    costs: StepCosts
    belief: Belief = field(init=False, default_factory=Belief)
    rates: np.ndarray = field(init=False)
    _verified: int = field(init=False, default=0)
    _since_draft: int = field(init=False, default=0)
    _debt_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:  # noqa: D105
        self.rates = np.zeros(max(self.widths))

    def expected_tokens(self, width: int) -> float:
        """Committed tokens a request and step."""
        return 1.0 + float(self.rates[1:width].sum())

    def tokens_per_second(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Of the whole batch."""
        return batch_size * self.expected_tokens(width) / self.costs.estimate(width, batch_size, context_tokens)

    def choose(self, batch_size: int, context_tokens: int) -> int:
        """The width for a step, by expected tokens per second; now and then the next wider one, to see its nodes."""
        if self._verified < FIRST_REQUESTS:
            return max(self.widths)
        best = max(self.widths, key=lambda w: self.tokens_per_second(w, batch_size, context_tokens))
        wider = min((w for w in self.widths if w > best), default=best)
        spent = self.costs.last_known(best, batch_size, context_tokens)
        extra = self.costs.last_known(wider, batch_size, context_tokens) - spent
        self._debt_seconds += PROBE_SHARE * spent
        if wider != best and extra <= self._debt_seconds:
            self._debt_seconds -= max(extra, 0.0)
            return wider
        return best

    def pass_over(self, batch_size: int) -> None:
        """Note a step of `batch_size` requests that drafted nothing: what is known of the trees gets older."""
        self._since_draft += batch_size

    def observe(self, width: int, probabilities: np.ndarray, accepted: np.ndarray) -> None:
        """Learn from a step of `B` requests that verified `width` nodes each.

        probabilities: `[B, max(widths)]` of the tree's nodes by the drafter.
        accepted: `[B, max(widths)]` bool, whether a node was on the path; those below `width` count.
        """
        batch_size = len(probabilities)
        self._since_draft += batch_size
        self.belief.learn(probabilities[:, 1:width], accepted[:, 1:width])
        weight = min(MAX_STEP_WEIGHT, 1 - 0.5 ** (self._since_draft / TREE_REQUESTS))
        weight = max(weight, batch_size / (self._verified + batch_size))
        self.rates += weight * (self.belief.rates(probabilities).mean(0) - self.rates)
        self._verified += batch_size
        self._since_draft = 0


def offered_widths(block_size: int, widest: int) -> list[int]:
    """No speculation, the draft block, then doubling budgets up to the widest tree: few, as each is captured."""
    budgets = [8, 16, 32, 64, 128, 256, 512]
    return sorted({1, block_size, widest, *(b + 1 for b in budgets if block_size < b + 1 < widest)})

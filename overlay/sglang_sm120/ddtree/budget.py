"""Which verify width pays: expected tokens per second, from the drafter's probabilities and the times of real steps.

A smaller best-first tree is the beginning of a larger one, and every draft builds the largest. So each step that drafts
shows what every width would have offered, verified or not: the probability of node i by the drafter. How far to believe
it is learned from the nodes that were verified, by halvings of probability; what holds for one halving is the first
guess for the next. A step of width w commits `1 + rate[1] + ... + rate[w - 1]` tokens a request on average. Width 1 is
no speculation. The width of the draft block is the smallest tree; it takes the chain's nodes wherever the drafter is
sure, at the chain's cost.

What a step takes is learned from the steps that are run, whether host or device sets the pace. Costs measured at start
are where this begins: they say how a step grows with its load, and how widths compare until they have been tried. The
width that looks best runs; the others get short trials, and these may cost a small part of the time, no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

# Half of the weight is on the last so many requests that were verified, and for the trees' probabilities on the last
# so many that took a step; a step of 8 says more than a step of 1.
BELIEF_REQUESTS, TREE_REQUESTS = 512, 128
# The most that one step says about the trees of the next ones.
MAX_STEP_WEIGHT = 0.25
# Halvings of probability told apart, and how many hits the first guess for one weighs.
HALVINGS, GUESS_HITS = 12, 1.0
# A width is worth a trial that would be the best one if its steps were faster than expected by so many deviations of
# what is not known of them.
HOPE_DEVIATIONS = 2.0
# So many requests are verified at the widest before anything is chosen.
FIRST_REQUESTS = 64
# Steps of a trial (what the first takes depends on the step before, so it does not count), and steps after it until it
# has been heard of. The part of the time that trials may cost; and how many steps' time, at a load that is new, a first
# trial of every width.
TRIAL_STEPS, REST_STEPS = 4, 8
TRIAL_SHARE, TRIAL_STEPS_AT_FIRST = 0.005, 40
# Standard deviations of the logarithm of a step's time over what was measured at start. What befalls all widths alike
# (a busy neighbour, a host that sets the pace) and what befalls one: at start, at a load that is new, a step later.
COMMON_AT_START, OWN_AT_START = 1.0, 1.0
COMMON_AT_LOAD, OWN_AT_LOAD = 0.5, 0.2
COMMON_A_STEP, OWN_A_STEP = 0.1, 0.01
# Of one step's time, and how many deviations off it is taken for no more than that.
STEP_NOISE, MOST_DEVIATIONS = 0.1, 3.0


@dataclass
class StepCosts:
    """Seconds of a step as measured at start: `seconds[width][batch] = (at no context, more per context token)`."""

    seconds: dict[int, dict[int, tuple[float, float]]]

    def estimate(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Seconds of a step of `batch_size` requests with `context_tokens` in all.

        Between measured batch sizes a line, past the largest one its cost a request, and a context token.
        """
        measured = self.seconds[width]
        sizes = sorted(measured)
        if batch_size > sizes[-1]:
            base, per_token = measured[sizes[-1]]
            return base * batch_size / sizes[-1] + per_token * context_tokens
        costs = [base + per_token * context_tokens for base, per_token in (measured[size] for size in sizes)]
        return float(np.interp(batch_size, sizes, costs))


@dataclass
class Pace:
    """What steps take over what was measured at start, by width and at one load: a Kalman filter over logarithms.

    mean: `[widths]`. covariance: `[widths, widths]`; widths share what befalls all of them, so that one which runs
    tells of the others, and what is known of one that does not run gets less certain.
    """

    mean: np.ndarray
    covariance: np.ndarray

    @classmethod
    def unknown(cls, widths: int) -> Pace:
        """Before any step was timed."""
        return cls(np.zeros(widths), _covariance(widths, COMMON_AT_START, OWN_AT_START))

    def elsewhere(self) -> Pace:
        """What this says of another load: of a width that was not tried at this one, no less than here."""
        own = np.maximum(0.0, OWN_AT_LOAD**2 - self.doubt())
        return Pace(self.mean.copy(), self.covariance + COMMON_AT_LOAD**2 + np.diag(own))

    def learn(self, at: int, log_ratio: float) -> None:
        """From one step of the width with index `at`."""
        self.covariance += _covariance(len(self.mean), COMMON_A_STEP, OWN_A_STEP)
        variance = self.covariance[at, at] + STEP_NOISE**2
        limit = MOST_DEVIATIONS * variance**0.5
        gain = self.covariance[at] / variance
        self.mean += gain * np.clip(log_ratio - self.mean[at], -limit, limit)
        self.covariance -= np.outer(gain, self.covariance[at])

    def doubt(self) -> np.ndarray:
        """`[widths]` variance of each width's ratio over that of the surest one."""
        own = self.covariance.diagonal()
        surest = own.argmin()
        return own + own[surest] - 2 * self.covariance[surest]


def _covariance(widths: int, common: float, own: float) -> np.ndarray:
    return np.full((widths, widths), common**2) + np.eye(widths) * own**2


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
            ratio = (self._hits[at] + GUESS_HITS) / (self._said[at] + GUESS_HITS / ratio)
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
    _paces: dict[tuple[int, int], Pace] = field(init=False, default_factory=dict)
    _latest: Pace = field(init=False)
    _begun: set[tuple[int, int]] = field(init=False, default_factory=set)
    _trial: int = field(init=False, default=0)
    _until_trial: int = field(init=False, default=0)
    _credit_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:  # noqa: D105
        self.rates = np.zeros(max(self.widths))
        self._latest = Pace.unknown(len(self.widths))

    def expected_tokens(self) -> np.ndarray:
        """`[widths]` committed tokens a request and step."""
        return 1.0 + np.cumsum(self.rates)[np.array(self.widths) - 1] - self.rates[0]

    def expected_seconds(self, batch_size: int, context_tokens: int) -> np.ndarray:
        """`[widths]` of a step."""
        measured = np.array([self.costs.estimate(width, batch_size, context_tokens) for width in self.widths])
        return measured * np.exp(self._pace(batch_size, context_tokens).mean)

    def choose(self, batch_size: int, context_tokens: int) -> int:
        """The width for a step, by expected tokens per second; now and then another one, to see what it takes."""
        if self._verified < FIRST_REQUESTS:
            return max(self.widths)
        tokens, seconds = self.expected_tokens(), self.expected_seconds(batch_size, context_tokens)
        best = int((tokens / seconds).argmax())
        losses = np.maximum(0.0, seconds - tokens * seconds[best] / tokens[best])
        doubt = self._pace(batch_size, context_tokens).doubt()
        promising = tokens / seconds * np.exp(HOPE_DEVIATIONS * doubt**0.5) > tokens[best] / seconds[best]
        promising[best] = False
        self._earn(TRIAL_STEPS * losses * promising, seconds[best], (batch_size, context_tokens))
        if self._until_trial == 0:
            self._trial = int((promising * doubt / (TRIAL_STEPS * losses + seconds[best])).argmax())
            if not promising[self._trial] or TRIAL_STEPS * losses[self._trial] > self._credit_seconds:
                return self.widths[best]
            self._until_trial = TRIAL_STEPS + REST_STEPS
        self._until_trial -= 1
        if self._until_trial < REST_STEPS:
            return self.widths[best]
        self._credit_seconds -= losses[self._trial]
        return self.widths[self._trial]

    def _earn(self, trials: np.ndarray, step: float, load: tuple[int, int]) -> None:
        """Add to what trials may cost, in seconds: a share of this step's, as long as no trial could spend it."""
        if self._credit_seconds < trials.max():
            self._credit_seconds += TRIAL_SHARE * step
        if (key := _key(*load)) not in self._begun:
            self._begun.add(key)
            self._credit_seconds += min(TRIAL_STEPS_AT_FIRST * step, trials.sum())

    def learn(self, width: int, batch_size: int, context_tokens: int, seconds: float) -> None:
        """From a step that took `seconds` after another of the same width."""
        pace = self._latest = self._pace(batch_size, context_tokens)
        measured = self.costs.estimate(width, batch_size, context_tokens)
        pace.learn(self.widths.index(width), float(np.log(max(seconds, 1e-9) / measured)))

    def _pace(self, batch_size: int, context_tokens: int) -> Pace:
        key = _key(batch_size, context_tokens)
        if key not in self._paces:
            self._paces[key] = self._latest.elsewhere()
        return self._paces[key]

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


def _key(batch_size: int, context_tokens: int) -> tuple[int, int]:
    """Of loads that are within a factor of two of each other."""
    return batch_size.bit_length(), context_tokens.bit_length()


def offered_widths(block_size: int, widest: int) -> list[int]:
    """No speculation, the draft block, then doubling budgets up to the widest: few, as each is captured and tried."""
    budgets = [8, 16, 32, 64, 128, 256, 512]
    return sorted({1, block_size, widest, *(b + 1 for b in budgets if 2 * block_size <= b < widest - 1)})

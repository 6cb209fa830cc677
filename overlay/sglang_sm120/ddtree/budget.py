"""Which verify width pays: expected tokens per second, from acceptance seen so far and step times measured at start-up.

A smaller best-first tree is the beginning of a larger one, so one statistic serves all widths: `hits[i]`, how often
node i of the tree was on the accepted path. A step of width w commits `1 + hits[1] + ... + hits[w - 1]` tokens on
average. Width 1 is no speculation. The width of the draft block is the smallest tree; it takes the chain's nodes
wherever the drafter is sure, at the chain's cost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Half of the weight is on the last so many requests; a step of 8 says more than a step of 1.
MEMORY_REQUESTS = 1024
# Part of the time that may go to steps wider than the best one, to learn what their last nodes are worth.
PROBE_SHARE = 0.01
# Before anything was seen, each further node is on the path this much less often than the one before.
PRIOR_DECAY, PRIOR_REQUESTS = 0.7, 8


@dataclass
class StepCosts:
    """Seconds of a whole step: `seconds[width][batch] = (at no context, more per context token of the batch)`."""

    seconds: dict[int, dict[int, tuple[float, float]]]

    def estimate(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Cost of a step of `batch_size` requests with `context_tokens` in all; takes the next batch size measured."""
        measured = self.seconds[width]
        size = min((b for b in measured if b >= batch_size), default=max(measured))
        base, per_token = measured[size]
        return base + per_token * context_tokens


@dataclass
class WidthPolicy:
    """Chooses one of `widths` a step. Every input is the same on all ranks, and so is every choice."""

    widths: list[int]
    costs: StepCosts
    hits: list[float] = field(init=False)
    _seen_requests: list[int] = field(init=False)
    _debt_seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:  # noqa: D105
        self.hits = [PRIOR_DECAY**i for i in range(max(self.widths))]
        self._seen_requests = [PRIOR_REQUESTS] * max(self.widths)

    def expected_tokens(self, width: int) -> float:
        """Committed tokens a request and step."""
        return 1.0 + sum(self.hits[1:width])

    def tokens_per_second(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Of the whole batch."""
        return batch_size * self.expected_tokens(width) / self.costs.estimate(width, batch_size, context_tokens)

    def choose(self, batch_size: int, context_tokens: int) -> int:
        """The width for a step, by expected tokens per second; now and then the widest, to see its last nodes."""
        best = max(self.widths, key=lambda w: self.tokens_per_second(w, batch_size, context_tokens))
        widest = max(self.widths)
        spent = self.costs.estimate(best, batch_size, context_tokens)
        extra = self.costs.estimate(widest, batch_size, context_tokens) - spent
        self._debt_seconds += PROBE_SHARE * spent
        if best != widest and extra <= self._debt_seconds:
            self._debt_seconds -= max(extra, 0.0)
            return widest
        return best

    def observe(self, width: int, path_counts: list[int], batch_size: int) -> None:
        """Learn from a step: `path_counts[i]` of its `batch_size` requests accepted node i, for i below `width`."""
        recent = 1 - 0.5 ** (batch_size / MEMORY_REQUESTS)
        for i in range(1, width):
            self._seen_requests[i] += batch_size
            weight = max(recent, batch_size / self._seen_requests[i])
            self.hits[i] += weight * (path_counts[i] / batch_size - self.hits[i])


def offered_widths(block_size: int, widest: int) -> list[int]:
    """No speculation, the draft block, then doubling budgets up to the widest tree: few, as each is captured."""
    budgets = [8, 16, 32, 64, 128, 256, 512]
    return sorted({1, block_size, widest, *(b + 1 for b in budgets if block_size < b + 1 < widest)})

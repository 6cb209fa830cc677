"""Which units of a pool change places in one pass, so that requests lie in long runs.

```
sort      windows of the pool by (owner, position), those that gain most       on the device, all at once
gather    pieces of requests that are still scattered, one after the other     on the host: many small decisions
cut       the permutation that all of it amounts to, into lists to move        on the device
```
A unit that several decisions move changes place once. All of them are permutations of places, so no free space is
needed, and free units end up together as well. They depend on ids only: every rank of a tensor parallel group that has
the same tables makes the same plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch.nn.functional import pad

from sglang_sm120.kvdefrag import census

if TYPE_CHECKING:
    from sglang_sm120.kvdefrag.compactor import Survey

UNITS_PER_GAP = 64
"""Moving is worth it if it closes at least one gap for this many units."""
PIECES_A_PASS = 64
"""Pieces looked at: each costs the host a tenth of a millisecond or two, whether it pays or not."""
LEAST_SHARE_OF_BUDGET = 1 / 4
"""A pass that closes fewer gaps than would pay for moving so much is not worth stopping the server for."""

Ids = TypeVar("Ids", torch.Tensor, np.ndarray)
Chunk = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Plan:
    """Chunks, one after the other: in each, what lies at `src[i]` goes to `dst[i]`."""

    chunks: list[Chunk]
    """`[n]` int64, a permutation of places, or `[m, n]`, where no row touches another's; -1 in both is no place."""
    new_unit: torch.Tensor
    """`[units + 1]` int64: where each unit's content is in the end."""
    units_moved: int
    gaps_closed: int
    pieces: int
    """Pieces that were gathered."""

    def moved(self, by_unit: torch.Tensor) -> torch.Tensor:
        """What was said of each unit, `[units + 1]`, said of where its content is in the end."""
        after = torch.empty_like(by_unit)
        after[self.new_unit] = by_unit
        return after


def plan(survey: Survey, window: int, budget_units: int, units_per_gap: int = UNITS_PER_GAP) -> Plan | None:
    """Sorted windows, those that close the most gaps, and gathered pieces; None if that is not worth a pass.

    Args:
        survey: the pool.
        window: units of a window, of a piece that is gathered, and of a list of the move.
        budget_units: units that may be moved, rounded up to one window, or to what one piece moves: twice that at most.
        units_per_gap: a window or piece pays if it closes one gap, or more, for so many units.
    """
    order = Order(survey)
    window = min(window, order.units)
    moves = _sort_windows(order, window, budget_units, units_per_gap)
    if not moves.units_moved or moves.units_moved + 2 * window <= budget_units:
        moves = _gather_pieces(survey, order, moves, window, budget_units, units_per_gap)
    least = max(LEAST_SHARE_OF_BUDGET * min(budget_units, order.units) / units_per_gap, 1)
    return moves if moves.gaps_closed >= least else None


class Order:
    """In which order units should lie."""

    def __init__(self, survey: Survey) -> None:
        self.units = len(survey.owner) - 1
        self.key = survey.owner * (self.units + 1) + survey.position
        """`[units + 1]` int64: grows by one from a unit to the one that follows it in its segment."""
        self.free = len(survey.lengths) * (self.units + 1)
        """The lowest key of a free unit."""

    def gaps(self, left: Ids, right: Ids) -> Ids:
        """Whether a run ends between neighbours with these keys: they do not follow each other, nor are both free."""
        return (right != left + 1) & ~((left >= self.free) & (right >= self.free))


def _sort_windows(order: Order, window: int, budget_units: int, units_per_gap: int) -> Plan:
    """Sort the units inside the windows that gain most. Cures what decoding side by side has mixed up nearby."""
    count = order.units // window
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for offset in {1, 1 + order.units - count * window}:  # from either end: seams fall at different places
        ids = torch.arange(offset, offset + count * window, device=order.key.device).view(count, window)
        before = order.key[ids]
        after, index = before.sort(dim=1)
        gain = order.gaps(before[:, :-1], before[:, 1:]).sum(1) - order.gaps(after[:, :-1], after[:, 1:]).sum(1)
        if best is None or gain.max() > best[0].max():
            best = gain, ids, index
    assert best is not None
    gain, ids, index = best
    chosen = gain.argsort(descending=True, stable=True)[: max(budget_units // window, 1)]
    dst, src = ids[chosen], ids[chosen].gather(1, index[chosen])
    worth_it = [
        (moved, gaps)
        for moved, gaps in torch.stack([(src != dst).sum(1), gain[chosen]], 1).tolist()
        if gaps > 0 and gaps * units_per_gap >= window
    ]
    src, dst = src[: len(worth_it)], dst[: len(worth_it)]
    new_unit = torch.arange(order.units + 1, device=order.key.device)
    new_unit[src] = dst
    stays = src == dst
    chunk = src.masked_fill(stays, -1), dst.masked_fill(stays, -1)
    return Plan([chunk], new_unit, sum(moved for moved, _ in worth_it), sum(gaps for _, gaps in worth_it), pieces=0)


def _gather_pieces(
    survey: Survey, order: Order, moves: Plan, window: int, budget_units: int, units_per_gap: int
) -> Plan:
    """Gather scattered pieces, after the moves planned so far, while the budget lasts."""
    layout = Layout(order, moves)
    lengths = [min(window, length - begin) for length in survey.lengths for begin in range(0, length, window)]
    for piece in islice(_scattered(layout, survey.held.cpu(), lengths, units_per_gap), PIECES_A_PASS):
        if layout.moved and layout.moved + 2 * len(piece) > budget_units:
            break
        layout.gather(layout.at[piece], units_per_gap)
    if not layout.gathered:
        return moves
    new_unit = torch.from_numpy(layout.at).to(order.key.device)
    return Plan(in_lists(new_unit, window), new_unit, layout.moved, layout.gaps_closed, layout.gathered)


def _scattered(layout: Layout, held: torch.Tensor, lengths: list[int], units_per_gap: int) -> Iterator[np.ndarray]:
    """Pieces in so many runs that gathering them may pay, the most runs first; over again while gaps are closed."""
    pieces, closed = held.split(lengths), -1
    while closed < layout.gaps_closed:
        closed = layout.gaps_closed
        runs = census.run_counts(torch.from_numpy(layout.at)[held].split(lengths), "cpu")
        counts = runs.tolist()
        for i in runs.argsort(descending=True, stable=True).tolist():
            if counts[i] > 1 and counts[i] * units_per_gap >= lengths[i]:  # with fewer runs it hardly ever does
                yield pieces[i].numpy()


class Layout:
    """The pool as it will be once what was decided so far is moved, on the host."""

    def __init__(self, order: Order, moves: Plan) -> None:
        self._order = order
        self.moved, self.gaps_closed, self.gathered = moves.units_moved, moves.gaps_closed, moves.pieces
        self.at = moves.new_unit.cpu().numpy().copy()
        """`[units + 1]`: where each unit of the survey lies"""
        places = np.arange(len(self.at))
        self.unit = np.empty_like(self.at)
        """`[units + 1]`: the unit of the survey that lies at each place"""
        self.unit[self.at] = places
        self.key = np.append(order.key.cpu().numpy()[self.unit], order.free)
        """`[units + 2]`: of what lies at each place; behind the last one every run ends"""
        self._cheap = np.zeros((order.units + 7) // 8 * 8 + 8, np.bool_)
        """whether a place is free or the end of a run, from the eighth entry on: places 1 to 8 are the second eight"""
        self._cheap[places + 7] = self._tears_nothing(places)
        self._changing = np.zeros(len(self.at), np.bool_)

    def gather(self, piece: np.ndarray, units_per_gap: int) -> bool:
        """Move what lies at `piece` to consecutive places, what lies there, in order, where it was; whether it pays."""
        start, stop = self._least_torn(piece)
        inside = (piece >= start) & (piece < stop)
        target = np.arange(start, stop)
        others = np.delete(target, piece[inside] - start)
        src = np.concatenate([piece, others[self.key[others].argsort()]])
        dst = np.concatenate([target, np.sort(piece[~inside])])
        edges = self._edges(dst)
        before, gaps = self.key[dst], self._gaps(edges).sum()
        self.key[dst] = self.key[src]
        gained = int(gaps - self._gaps(edges).sum())
        if gained <= 0 or gained * units_per_gap < len(src):
            self.key[dst] = before
            return False
        self.gaps_closed += gained
        self.gathered += 1
        self.moved -= int((self.unit[dst] != dst).sum())
        self.unit[dst] = self.unit[src]
        self.moved += int((self.unit[dst] != dst).sum())
        self.at[self.unit[dst]] = dst
        self._cheap[edges + 7] = self._tears_nothing(edges)
        return True

    def _least_torn(self, piece: np.ndarray) -> tuple[int, int]:
        """Begin and end of as many places, most of them its own, free or ends of runs; one in eight is tried."""
        count, as_it_is = len(piece), self._cheap[piece + 7]
        self._cheap[piece + 7] = True
        so_far = np.bitwise_count(self._cheap.view(np.uint64)).cumsum(dtype=np.int32)  # 8 entries of 1 byte a word
        self._cheap[piece + 7] = as_it_is
        eights = -(-count // 8)
        starts = (self._order.units - count) // 8 + 1
        start = 8 * int((so_far[eights:] - so_far[:-eights])[:starts].argmax()) + 1
        return start, start + count

    def _edges(self, places: np.ndarray) -> np.ndarray:
        """The places and those before them, none twice: where runs may end, or no longer, once the places change."""
        self._changing[places] = True
        edges = np.append(places, places[~self._changing[places - 1]] - 1)
        self._changing[places] = False
        return edges

    def _gaps(self, places: np.ndarray) -> np.ndarray:
        """Whether a run ends at each of the places."""
        return self._order.gaps(self.key[places], self.key[places + 1])

    def _tears_nothing(self, places: np.ndarray) -> np.ndarray:
        return self._gaps(places) | (self.key[places] >= self._order.free)


def in_lists(new_unit: torch.Tensor, length: int) -> list[Chunk]:
    """Cut a permutation, whatever its cycles, into lists of `length` units: a chunk, and often a small one after it.

    The cycles are laid out one after another and cut into lists. In a list, the units of a cycle change places in a
    circle. So where a cycle lies in several, the first unit of each part, which should go to the list before, lands at
    the end of its own; the second chunk, two units a list at most, sees to those. It is a single list: a pass of more
    than some three thousand lists would be too much for `move_kv`, which then raises, and `commit` undoes the first.
    """
    device = new_unit.device
    places = (new_unit != torch.arange(len(new_unit), device=device)).nonzero().view(-1)
    count = torch.arange(len(places), device=device)
    index = torch.empty_like(new_unit)
    index[places] = count
    # The lowest place of each one's cycle, and the moves to there, by pointer jumping.
    ahead, steps = index[new_unit[places]], 1
    rank = count * len(places)
    while steps < len(places):
        rank = torch.minimum(rank, rank[ahead] + steps)
        ahead, steps = ahead[ahead], 2 * steps
    order = rank.argsort()  # each goes where the one before it was, the first of a cycle where the last was
    src, cycle = places[order], rank[order] // len(places)
    begins = cycle != cycle.roll(1)
    begins[::length] = True
    first, last = src[begins], src[begins.roll(-1)]
    dst = src.roll(1)
    dst[begins] = last
    lists = -(-len(places) // length)
    fill = (0, lists * length - len(places))
    chunks = [(pad(src, fill, value=-1).view(lists, length), pad(dst, fill, value=-1).view(lists, length))]
    goes_on = last != new_unit[first]
    if goes_on.any():
        chunks.append((last[goes_on], new_unit[first[goes_on]]))
    return chunks

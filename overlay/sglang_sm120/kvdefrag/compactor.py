"""Tier 1: move KV inside the pool so that requests lie in long runs, and rewrite every holder of the ids with it.

```
survey     who owns which unit, in token order                rows, tree values --> owner, position of each unit
plan       sort windows of the pool by (owner, position),     permutations of places: no free space is needed, and
           then gather the pieces that are still scattered    free units end up together as well
commit     move the KV, then rows, tree values, free list     a fault at any stage undoes what was done before it
```
A unit is a page of the allocator (a slot where the page size is 1). The plan depends on ids only, so every rank of a
tensor parallel group that has the same tables makes the same plan. All of it runs where the tables are; a few small
results reach the host. It may only run at a safe point: no forward in flight, no id held outside `Holders`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.kvdefrag import census
from sglang_sm120.kvdefrag.extents import ExtentAllocator, longest_first

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo

# Moving is worth it if it closes at least one gap for this many units.
UNITS_PER_GAP = 64
# Each gathered piece is planned on its own, which takes longer than to move it.
GATHERS_A_PASS = 8
FULL = 0  # upstream's ComponentType.FULL: the index of a node's KV slots


@dataclass
class Holders:
    """What holds slot ids at a safe point: rows of requests, the prefix cache, the allocator."""

    requests: Sequence[ReqKvInfo]
    req_to_token: torch.Tensor
    tree: Any
    allocator: Any

    def __post_init__(self) -> None:
        """Take back extents that no live request can grow into."""
        if isinstance(self.allocator, ExtentAllocator):
            self.allocator.keep_extents_at({kv.req_pool_idx: kv.kv_allocated_len for kv in self.requests})

    @property
    def page_size(self) -> int:
        """Slots of a unit."""
        return self.allocator.page_size

    def row_length(self, kv: ReqKvInfo) -> int:
        """Positions of a request's row that hold slots, those of its extent included."""
        if isinstance(self.allocator, ExtentAllocator):
            return max(kv.kv_allocated_len, self.allocator.reserved(kv.req_pool_idx)[1])
        return kv.kv_allocated_len

    def free_units(self) -> torch.Tensor:
        """Units that no row, no extent and no tree value holds, in no order."""
        if isinstance(self.allocator, ExtentAllocator):
            return self.allocator.unreserved_slots()
        return self.allocator.get_all_free_pages()

    def replace_free_units(self, units: torch.Tensor) -> Callable[[], None]:
        """Make sorted `units` the free list; return what puts the old one back."""
        if isinstance(self.allocator, ExtentAllocator):
            return self.allocator.replace_unreserved_slots(units)
        before = self.allocator.free_pages
        self.allocator.free_pages = longest_first(units, units.new_zeros(self.allocator.size + 1))
        return lambda: setattr(self.allocator, "free_pages", before)

    def census(self, block: int) -> census.Census:
        """Runs of each request's whole row, prefix included, and of the free space."""
        page, table = self.page_size, self.req_to_token
        rows = [table[kv.req_pool_idx, : self.row_length(kv) : page].long() // page for kv in self.requests]
        return census.take(rows, self.free_units(), self.allocator.size // page, block)

    def nodes(self) -> list[Any]:
        """Tree nodes that hold KV on the device, depth first, so that a path's nodes follow each other."""
        nodes, stack = [], [self.tree.tree_core.root_node]
        while stack:
            node = stack.pop()
            if node.parent is not None and node.component_data[FULL].value is not None:
                nodes.append(node)
            stack.extend(node.children.values())
        return nodes


@dataclass
class Survey:
    """Owners at one moment. A segment is one tree value or one request's private tail, its units in token order."""

    holders: Holders
    nodes: list[Any]
    free: torch.Tensor
    """`[n]` int64: the free units, in no order."""
    held: torch.Tensor
    """`[m]` int64: the units of all segments, one after the other."""
    lengths: list[int]
    """Units of each segment."""
    owner: torch.Tensor
    """`[units + 1]` int64: segment of each unit; `len(lengths)` where it is free."""
    position: torch.Tensor
    """`[units + 1]` int64: the unit's place in its segment."""

    @classmethod
    def take(cls, holders: Holders) -> Survey:
        """Survey the pool. RuntimeError if a unit has two owners or none: then somebody unknown holds ids."""
        page, units = holders.page_size, holders.allocator.size // holders.page_size
        nodes, table = holders.nodes(), holders.req_to_token
        cached = [node.component_data[FULL].value for node in nodes]
        if page > 1:
            cached = [slots[::page] for slots in cached]
        private = [
            table[kv.req_pool_idx, kv.cache_protected_len : holders.row_length(kv) : page] for kv in holders.requests
        ]
        lens = [len(s) for s in (*cached, *private)]
        # Values are int64 and rows int32, so they are put together apart: two copies instead of one a segment.
        held = torch.cat([torch.cat(slots).long() // page for slots in (cached, private) if slots] or [table[0, :0]])
        owner = torch.full((units + 1,), len(lens), device=table.device)
        position = torch.arange(units + 1, device=table.device)
        if lens:
            counts = torch.tensor(lens, device=table.device)
            owner[held] = torch.repeat_interleave(counts, output_size=len(held))
            before = counts.cumsum(0) - counts
            position[held] = torch.arange(len(held), device=table.device) - before[owner[held]]
        survey = cls(holders, nodes, holders.free_units().long(), held, lens, owner, position)
        survey._check()
        return survey

    def _check(self) -> None:
        free, held, units = self.free, len(self.held), len(self.owner) - 1
        is_held = self.owner < len(self.lengths)
        held_once, free_and_used = torch.stack([is_held[1:].sum(), is_held[free].sum()]).tolist()
        used_twice = held - held_once
        if used_twice or free_and_used or held + len(free) != units:
            raise RuntimeError(
                f"KV census: {held} units held ({used_twice} twice), {len(free)} free ({free_and_used} of them held), "
                f"{units} in the pool; some holder of KV ids is not accounted for, so nothing was moved."
            )


@dataclass
class Plan:
    """Permutations of units, one after the other: in each, what lies at `src[i]` goes to `dst[i]`.

    One is `[n]` int64, or `[m, n]` where each row is a permutation of places that no other row touches; -1 in both
    where a unit stays.
    """

    chunks: list[tuple[torch.Tensor, torch.Tensor]]
    new_unit: torch.Tensor
    """`[units + 1]` int64: where each unit's content is in the end."""
    units_moved: int
    gaps_closed: int

    def moved(self, by_unit: torch.Tensor) -> torch.Tensor:
        """What was said of each unit, `[units + 1]`, said of where its content is in the end."""
        after = torch.empty_like(by_unit)
        after[self.new_unit] = by_unit
        return after


def plan(survey: Survey, window: int, budget_units: int, units_per_gap: int = UNITS_PER_GAP) -> Plan | None:
    """Sorted windows, those that close the most gaps, or else gathered segments; None if nothing pays.

    Args:
        survey: the pool.
        window: units of a window, and of a piece that is gathered; a chunk moves up to twice that.
        budget_units: units that may be moved, rounded up to one window or piece.
        units_per_gap: a chunk pays if it closes one gap, or more, for so many units that it moves.
    """
    layout = Layout(survey)
    _sort_windows(layout, min(window, layout.units), budget_units, units_per_gap)
    if not layout.chunks:
        _gather_segments(layout, min(window, layout.units), budget_units, units_per_gap)
    return Plan(layout.chunks, layout.at, layout.units_moved, layout.gaps_closed) if layout.chunks else None


class Layout:
    """The pool as it will be once the chunks so far are moved."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.units = len(survey.owner) - 1
        self.free_key = len(survey.lengths) * (self.units + 1)
        self.key = survey.owner * (self.units + 1) + survey.position
        """`[units + 1]` int64: grows by one from a unit to the one that follows it in its segment"""
        self.at = torch.arange(self.units + 1, device=self.key.device)
        """`[units + 1]` int64: where the unit of the survey is now"""
        self.chunks: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.units_moved = self.gaps_closed = 0

    def gaps(self, key: torch.Tensor) -> torch.Tensor:
        """Bool, one shorter than `key [..., n]`: whether a run ends there, but for places between two free units."""
        left, right = key[..., :-1], key[..., 1:]
        return (right != left + 1) & ~((left >= self.free_key) & (right >= self.free_key))

    def permuted(self, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
        """The key after a chunk."""
        key = self.key.clone()
        key[dst] = self.key[src]
        return key

    def add(self, src: torch.Tensor, dst: torch.Tensor, units_moved: int, gaps_closed: int) -> None:
        """Take a chunk into the plan."""
        self.key = self.permuted(src, dst)
        moved = torch.arange(self.units + 1, device=self.key.device)
        moved[src] = dst
        self.at = moved[self.at]
        stays = src == dst
        self.chunks.append((src.masked_fill(stays, -1), dst.masked_fill(stays, -1)))
        self.units_moved += units_moved
        self.gaps_closed += gaps_closed


def _sort_windows(layout: Layout, window: int, budget_units: int, units_per_gap: int) -> None:
    """Sort the units inside the windows that gain most. Cures what decoding side by side has mixed up nearby."""
    count = layout.units // window
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    for offset in {1, 1 + layout.units - count * window}:  # from either end: seams fall at different places
        ids = torch.arange(offset, offset + count * window, device=layout.key.device).view(count, window)
        keys, order = layout.key[ids].sort(dim=1)
        gain = layout.gaps(layout.key[ids]).sum(1) - layout.gaps(keys).sum(1)
        if best is None or gain.max() > best[0].max():
            best = gain, ids, order
    assert best is not None
    gain, ids, order = best
    chosen = gain.argsort(descending=True, stable=True)[: max(budget_units // window, 1)]
    dst, src = ids[chosen], ids[chosen].gather(1, order[chosen])
    worth_it = [
        (moved, gaps)
        for moved, gaps in torch.stack([(src != dst).sum(1), gain[chosen]], 1).tolist()
        if gaps > 0 and gaps * units_per_gap >= window
    ]
    if worth_it:
        count = len(worth_it)
        layout.add(src[:count], dst[:count], sum(moved for moved, _ in worth_it), sum(gaps for _, gaps in worth_it))


def _gather_segments(layout: Layout, window: int, budget_units: int, units_per_gap: int) -> None:
    """Bring a scattered piece of a segment to one place; what lies there goes, in order, where the piece was."""
    segments = layout.survey.held.split(layout.survey.lengths)
    pieces = [piece for segment in segments for piece in segment.split(window) if len(piece) > 1]
    if not pieces:
        return
    runs = census.run_counts(pieces, layout.key.device)
    most = min(max(budget_units // (2 * window), 1), GATHERS_A_PASS)
    for index in runs.argsort(descending=True, stable=True)[:most].tolist():
        piece = layout.at[pieces[index]]
        src, dst = _exchange(layout, piece)
        gained = layout.gaps(layout.key).sum() - layout.gaps(layout.permuted(src, dst)).sum()
        moved, gaps = torch.stack([(src != dst).sum(), gained]).tolist()
        if gaps > 0 and gaps * units_per_gap >= len(src):
            layout.add(src, dst, moved, gaps)


def _exchange(layout: Layout, piece: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Move `piece [n]` to the `n` places where least is torn apart: its own, free ones, ends of runs."""
    device = layout.key.device
    cheap = torch.zeros(layout.units + 1, dtype=torch.int64, device=device)
    cheap[1:-1] = layout.gaps(layout.key[1:])
    cheap[layout.key >= layout.free_key] = 1
    cheap[piece] = 1
    before = torch.nn.functional.pad(cheap.cumsum(0), (1, 0))
    start = (before[1 + len(piece) :] - before[1 : -len(piece)]).argmax() + 1
    target = start + torch.arange(len(piece), device=device)
    involved = torch.zeros(layout.units + 1, dtype=torch.bool, device=device)
    involved[target] = involved[piece] = True
    others = involved.index_fill(0, piece, False).nonzero().view(-1)
    vacated = involved.index_fill(0, target, False).nonzero().view(-1)
    src = torch.cat([piece, others[layout.key[others].argsort()]])
    dst = torch.cat([target, vacated])
    return src, dst


Launch = Callable[[torch.Tensor, torch.Tensor], None]


class Pool:
    """One KV pool: buffers `[slots, ...]`, one or two a layer, that are indexed by the allocator's slot ids."""

    unit_bytes: int
    """Bytes of one unit over all layers."""
    launches: list[Launch]
    """Functions that together move units `src` to `dst`, as if all were read before any is written; -1 is no unit."""

    def __init__(self, buffers: Sequence[torch.Tensor], page_size: int) -> None:
        by_size: dict[int, list[torch.Tensor]] = {}
        for buffer in buffers:
            by_size.setdefault(buffer[0].numel() * buffer.element_size() * page_size, []).append(buffer)
        self.unit_bytes = sum(size * len(alike) for size, alike in by_size.items())
        if buffers[0].is_cuda:
            self.launches = [_kernel_launch(alike, size) for size, alike in by_size.items()]
        else:
            self.launches = [partial(_move_by_torch, _pages(buffer, page_size)) for buffer in buffers]


def _kernel_launch(buffers: Sequence[torch.Tensor], unit_bytes: int) -> Launch:
    from sglang_sm120 import ops

    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], device=buffers[0].device)
    return partial(ops.move_kv, pointers, unit_bytes)


def _pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    whole = len(buffer) // page_size
    return buffer[: whole * page_size].view(whole, page_size, *buffer.shape[1:])


def _move_by_torch(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    moves = dst >= 0
    pages[dst[moves]] = pages[src[moves]]


def commit(
    survey: Survey, moves: Plan, pools: Sequence[Pool], at_stage: Callable[[str], None] = lambda _: None
) -> None:
    """Carry the plan out. Whatever is raised on the way, the pool, rows, tree and free list are as before it.

    `at_stage` is called with the name of each stage before it and with "done" at the end; tests raise from it.
    """
    undo: list[Callable[[], None]] = []
    try:
        for name, launch, src, dst in _move_stages(moves, pools):
            at_stage(name)
            launch(src, dst)
            undo.append(partial(launch, dst, src))
        for name, rewrite in (("rows", _rewrite_rows), ("tree", _rewrite_tree), ("free list", _rewrite_free_list)):
            at_stage(name)
            undo.append(rewrite(survey, moves))
        at_stage("done")
    except BaseException:
        for restore in reversed(undo):
            restore()
        raise


def _move_stages(moves: Plan, pools: Sequence[Pool]) -> Iterator[tuple[str, Callable, torch.Tensor, torch.Tensor]]:
    for number, pool in enumerate(pools):
        for part, launch in enumerate(pool.launches):
            for chunk, (src, dst) in enumerate(moves.chunks):
                yield f"pool {number} part {part} chunk {chunk}", launch, src, dst


def _new_slots(survey: Survey, moves: Plan, slots: torch.Tensor) -> torch.Tensor:
    """Slot ids after the moves, in the dtype of `slots`."""
    page = survey.holders.page_size
    long = slots.long()
    return (moves.new_unit[long // page] * page + long % page).to(slots.dtype)


def _rewrite_rows(survey: Survey, moves: Plan) -> Callable[[], None]:
    holders = survey.holders
    table = holders.req_to_token
    spans = [table[kv.req_pool_idx, : holders.row_length(kv)] for kv in holders.requests]
    if not spans:
        return lambda: None
    before = torch.cat(spans)

    def put(slots: torch.Tensor) -> None:
        torch._foreach_copy_(spans, slots.split([len(span) for span in spans]))

    put(_new_slots(survey, moves, before))
    return partial(put, before)


def _rewrite_tree(survey: Survey, moves: Plan) -> Callable[[], None]:
    """Give each node new values, cut from one tensor; the old ones are not written to, other holders may share them."""
    before = [node.component_data[FULL].value for node in survey.nodes]

    def put(values: Sequence[torch.Tensor]) -> None:
        for node, value in zip(survey.nodes, values, strict=True):
            node.component_data[FULL].value = value

    if before:
        put(_new_slots(survey, moves, torch.cat(before)).split([len(v) for v in before]))
    return partial(put, before)


def _rewrite_free_list(survey: Survey, moves: Plan) -> Callable[[], None]:
    return survey.holders.replace_free_units(moves.new_unit[survey.free].sort().values)

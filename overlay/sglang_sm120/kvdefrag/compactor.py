"""Tier 1: move KV inside the pool so that requests lie in long runs, and rewrite every holder of the ids with it.

```
survey     who owns which unit, in token order                rows, tree values --> owner, position of each unit
plan       windows of the pool in which sorting the units     a permutation inside each window: no free space is
           by (owner, position) closes the most gaps          needed, and the free units end up at the window's end
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
from sglang_sm120.kvdefrag.extents import ExtentAllocator, order_runs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo

# A window is worth moving if it closes at least one gap for this many of its units.
UNITS_PER_GAP = 16
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
        self.allocator.free_pages = order_runs(units, 1)
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
    """Owners at one moment. A segment is one tree value or one request's private tail, as unit ids in token order."""

    holders: Holders
    nodes: list[Any]
    segments: list[torch.Tensor]
    owner: torch.Tensor
    """`[units + 1]` int64: segment of each unit; `len(segments)` where it is free."""
    position: torch.Tensor
    """`[units + 1]` int64: the unit's place in its segment."""

    @classmethod
    def take(cls, holders: Holders) -> Survey:
        """Survey the pool. RuntimeError if a unit has two owners or none: then somebody unknown holds ids."""
        page, units = holders.page_size, holders.allocator.size // holders.page_size
        nodes = holders.nodes()
        slots = [node.component_data[FULL].value for node in nodes]
        for kv in holders.requests:
            slots.append(holders.req_to_token[kv.req_pool_idx, kv.cache_protected_len : holders.row_length(kv)])
        segments = [s[::page].long() // page if page > 1 else s.long() for s in slots]
        owner = torch.full((units + 1,), len(segments), device=holders.req_to_token.device)
        position = torch.arange(units + 1, device=owner.device)
        lens = [len(s) for s in segments]
        if segments:
            held, counts = torch.cat(segments), torch.tensor(lens, device=owner.device)
            owner[held] = torch.repeat_interleave(counts, output_size=len(held))
            before = counts.cumsum(0) - counts
            position[held] = torch.arange(len(held), device=owner.device) - before[owner[held]]
        survey = cls(holders, nodes, segments, owner, position)
        survey._check(sum(lens))
        return survey

    def _check(self, held: int) -> None:
        free = self.holders.free_units().long()
        units = len(self.owner) - 1
        used_twice = held - int((self.owner[1:] < len(self.segments)).sum())
        free_and_used = int((self.owner[free] < len(self.segments)).sum())
        if used_twice or free_and_used or held + len(free) != units:
            raise RuntimeError(
                f"KV census: {held} units held ({used_twice} twice), {len(free)} free ({free_and_used} of them held), "
                f"{units} in the pool; some holder of KV ids is not accounted for, so nothing was moved."
            )


@dataclass
class Plan:
    """The unit at `src[w, i]` goes to `dst[w, i]`, `[windows, window]` int64; a row of both holds the same ids."""

    src: torch.Tensor
    dst: torch.Tensor
    gaps_closed: int


def plan(survey: Survey, window: int, budget_units: int, units_per_gap: int = UNITS_PER_GAP) -> Plan | None:
    """The windows of `window` units that close the most gaps, at least one; None if none of them pays.

    Args:
        survey: the pool.
        window: units of a window.
        budget_units: units that may be moved, rounded to whole windows.
        units_per_gap: a window pays if it closes one gap, or more, for so many of its units.
    """
    units = len(survey.owner) - 1
    window = min(window, units)
    count = units // window
    best = None
    for offset in {1, 1 + (units - count * window)}:  # whole windows from either end: seams fall at different places
        ids = torch.arange(offset, offset + count * window, device=survey.owner.device).view(count, window)
        key = survey.owner[ids] * (units + 1) + survey.position[ids]
        order = key.sort(dim=1)
        free = len(survey.segments) * (units + 1)
        gain = _gaps(key, free) - _gaps(order.values, free)
        if best is None or gain.max() > best[0].max():
            best = gain, ids, order.indices
    gain, ids, order = best
    gains, chosen = gain.sort(descending=True, stable=True)
    gains = gains[: max(budget_units // window, 1)]
    gains = gains[(gains > 0) & (gains * units_per_gap >= window)].tolist()
    if not gains:
        return None
    chosen = chosen[: len(gains)]
    dst = ids[chosen]
    return Plan(dst.gather(1, order[chosen]), dst, sum(gains))


def _gaps(key: torch.Tensor, free: int) -> torch.Tensor:
    """Places in each row of `key [windows, window]` where the run ends, but for those between two free units."""
    apart = (key[:, 1:] != key[:, :-1] + 1) & ~((key[:, 1:] >= free) & (key[:, :-1] >= free))
    return apart.sum(1)


class Pool:
    """One KV pool: buffers `[slots, ...]`, one or two a layer, that are indexed by the allocator's slot ids."""

    def __init__(self, buffers: Sequence[torch.Tensor], page_size: int) -> None:
        self._buffers = list(buffers)
        self._page_size = page_size

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit over all layers."""
        return sum(self._bytes(b) for b in self._buffers)

    def launches(self) -> list[Callable[[torch.Tensor, torch.Tensor], None]]:
        """Functions that together move units `src` to `dst`, each as if it read all before it wrote any."""
        if not self._buffers[0].is_cuda:
            return [partial(_move_by_torch, self._pages(b)) for b in self._buffers]
        pointers: dict[int, list[int]] = {}
        for buffer in self._buffers:
            pointers.setdefault(self._bytes(buffer), []).append(buffer.data_ptr())
        device = self._buffers[0].device
        return [partial(_move_by_kernel, torch.tensor(p, device=device), size) for size, p in pointers.items()]

    def _bytes(self, buffer: torch.Tensor) -> int:
        return buffer[0].numel() * buffer.element_size() * self._page_size

    def _pages(self, buffer: torch.Tensor) -> torch.Tensor:
        whole = len(buffer) // self._page_size
        return buffer[: whole * self._page_size].view(whole, self._page_size, *buffer.shape[1:])


def _move_by_kernel(pointers: torch.Tensor, unit_bytes: int, src: torch.Tensor, dst: torch.Tensor) -> None:
    from sglang_sm120 import ops

    ops.move_kv(pointers, unit_bytes, src, torch.where(src == dst, -1, dst))


def _move_by_torch(pages: torch.Tensor, src: torch.Tensor, dst: torch.Tensor) -> None:
    pages[dst] = pages[src]


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
        for part, launch in enumerate(pool.launches()):
            for window, (src, dst) in enumerate(zip(moves.src, moves.dst, strict=True)):
                yield f"pool {number} part {part} window {window}", launch, src, dst


def _new_slots(survey: Survey, moves: Plan, slots: torch.Tensor) -> torch.Tensor:
    """Slot ids after the moves, in the dtype of `slots`."""
    page = survey.holders.page_size
    new_unit = torch.arange(len(survey.owner), device=slots.device)
    new_unit[moves.src.view(-1)] = moves.dst.view(-1)
    long = slots.long()
    return (new_unit[long // page] * page + long % page).to(slots.dtype)


def _rewrite_rows(survey: Survey, moves: Plan) -> Callable[[], None]:
    holders = survey.holders
    table = holders.req_to_token
    rows = torch.tensor([kv.req_pool_idx for kv in holders.requests], dtype=torch.int64)
    lens = torch.tensor([holders.row_length(kv) for kv in holders.requests], dtype=torch.int64)
    row = torch.repeat_interleave(rows, lens).to(table.device)
    begin = torch.repeat_interleave(lens.cumsum(0) - lens, lens)
    column = (torch.arange(len(begin)) - begin).to(table.device)
    before = table[row, column]
    table[row, column] = _new_slots(survey, moves, before)

    def restore() -> None:
        table[row, column] = before

    return restore


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
    is_free = survey.owner == len(survey.segments)
    is_free[0] = False
    is_free[moves.dst.view(-1)] = is_free[moves.src.view(-1)]
    return survey.holders.replace_free_units(is_free.nonzero().view(-1))

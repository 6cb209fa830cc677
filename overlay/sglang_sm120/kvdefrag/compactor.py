"""Tier 1: move KV inside the pool so that requests lie in long runs, and rewrite every holder of the ids with it.

```
survey     who owns which unit, in token order                rows, tree values --> owner, position of each unit
plan       which units change places (`planner.py`)           permutations of places: no free space is needed
commit     move the KV, then rows, tree values, free list     a fault at any stage undoes what was done before it
```
A unit is a page of the allocator (a slot where the page size is 1). Survey and commit run where the tables are; a few
small results reach the host. It may only run at a safe point: no forward in flight, no id held outside `Holders`.
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

    from sglang_sm120.kvdefrag.planner import Plan

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

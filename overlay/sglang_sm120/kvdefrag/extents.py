"""Tier 0: allocation at page size 1 that keeps a request's slots together. It moves no data and never waits for a GPU.

```
req_to_token row of a request      | prefix | extend | decode ... | reserved .......|
upstream's kv_allocated_len        ------------------------------>|
its extent, `_start` to `_end`                                    |<--------------->|
```
A request grows in extents: soft pages of consecutive slots, written into its own row ahead of `kv_allocated_len`,
where nothing of upstream looks. The host keeps two positions a row, so the ids never leave the device. Reserved slots
still count as available; they are trimmed when nothing else is left. Frees are staged, and merged now and then by one
sort that orders free runs longest first, after the run that fits the waiting request best.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.runtime_context import get_serving

from sglang_sm120.kvdefrag.settings import EXTENT

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

logger = logging.getLogger(__name__)

# Evicting a little more than asked, a 16th of the pool, keeps evictions and merges rare once the prefix cache is full.
EVICTION_SLACK = 16
# Decode steps whose slots are read from the rows at once.
LOOKAHEAD_STEPS = 16


class Want(NamedTuple):
    """Slots that a row must have (`need`) and should have (`wish`) reserved from `position` on."""

    row: int
    position: int
    need: int
    wish: int


@dataclass
class DecodeSteps:
    """The next slots of a decode batch: `slots` has one step's allocation, `[requests]` int64, for each step."""

    reqs: list[Req]
    rows: list[int]
    slots: tuple[torch.Tensor, ...]
    done: int = 0

    def serves(self, reqs: list[Req]) -> bool:
        """Whether a step is left for this very batch; when one changes, upstream makes a new list or a longer one."""
        return reqs is self.reqs and len(reqs) == len(self.rows) and self.done < len(self.slots)

    def settle(self, start: list[int], _end: list[int]) -> None:
        """Write down how far each row has come."""
        for row in self.rows:
            start[row] += self.done


@dataclass
class VerifySteps:
    """Rows of the batch under speculation, and the positions they are allocated up to."""

    rows: list[int]
    allocated: list[int]

    def settle(self, start: list[int], end: list[int]) -> None:
        """Write down how far each row has come; one that needed nothing may have no extent to come to."""
        for row, position in zip(self.rows, self.allocated, strict=True):
            start[row] = min(position, end[row])


class ExtentAllocator(TokenToKVPoolAllocator):
    """Upstream's token allocator with extents. `free_pages`, as upstream's, is what the next allocation is cut from."""

    def __init__(self, stock: TokenToKVPoolAllocator, rows: ReqToTokenPool, extent_tokens: int) -> None:
        """Take over the pool of `stock`; `extent_tokens` is the size of a soft page."""
        self.extent_tokens = extent_tokens
        self._half_extent = max(extent_tokens // 2, 1)  # what a request should have left, so that looking ahead pays
        self._rows = rows
        self._table = rows.req_to_token
        self._width = self._table.shape[1]
        self._ahead = torch.arange(LOOKAHEAD_STEPS, device=stock.device)[:, None]
        self._tally = torch.zeros(stock.size + 1, dtype=torch.int64, device=stock.device)
        super().__init__(stock.size, stock.dtype, stock.device, stock.get_kvcache(), need_sort=False)
        rows.register_on_alloc_rows(self._reclaim_rows)

    def clear(self) -> None:
        """Everything is free."""
        super().clear()
        self._staged: list[torch.Tensor] = []
        self._staged_tokens = 0
        self._forget_extents()
        self._steps: DecodeSteps | VerifySteps | None = None
        self.free_pages: torch.Tensor
        self.free_group: list[torch.Tensor] | None
        self._planned: ScheduleBatch | None = None

    # -- what upstream asks of an allocator --

    def available_size(self) -> int:
        """Slots that an allocation can get; extents count, they would be trimmed for it."""
        return self._unreserved() + self._reserved_tokens

    def get_all_free_pages(self) -> torch.Tensor:
        """The `available_size` free slots, `[n]` int64."""
        return torch.cat([self.free_pages, *self._staged, *self._reserved_slots()])

    def alloc(self, need_size: int) -> torch.Tensor | None:
        """`need_size` slots, `[n]` int64, for the prefill batch announced before, or for nobody; None if full."""
        batch, self._planned = self._planned, None
        return self._take(need_size) if batch is None else self._alloc_extend(batch, need_size)

    def free(self, free_index: torch.Tensor) -> None:
        """Stage slots for the next merge, or keep them for the end of upstream's free group."""
        if free_index.numel() == 0:
            return
        if self.free_group is None:
            self._stage(free_index.to(torch.int64, copy=True))
        else:
            self.free_group.append(self._copy_for_free_group(free_index))

    def free_group_end(self) -> None:
        """Stage what was freed since the group began; upstream copied it then."""
        pending, self.free_group = self.free_group, None
        for slots in pending or ():
            self._stage(slots.to(torch.int64))

    def evict_to_free_tokens(self, tree_cache: BasePrefixCache | None, num_tokens: int) -> None:
        """Evict before extents are trimmed, and a little more than asked so that it is not asked every step."""
        if tree_cache is None or not tree_cache.supports_prefix_sharing():
            return
        if self._planned is not None:
            extent, half = self.extent_tokens, self._half_extent
            num_tokens = sum(-(-(n + half) // extent) for n in self._planned.extend_lens) * extent
        shortfall = num_tokens - self._unreserved()
        if shortfall > 0:
            tree_cache.evict_for_alloc(EvictParams(num_tokens=shortfall + self.size // EVICTION_SLACK))

    # -- the free list --

    def _unreserved(self) -> int:
        return self.free_pages.numel() + self._staged_tokens  # numel, for len of a tensor takes three times as long

    def _stage(self, slots: torch.Tensor) -> None:
        self._staged.append(slots)
        self._staged_tokens += slots.numel()

    def _take(self, count: int) -> torch.Tensor | None:
        """The next `count` slots of the free list, merged or trimmed first if it is too short."""
        if count > self.available_size():
            return None
        if count > self._unreserved():
            self.trim()
        if count > self.free_pages.numel() or self._staged_tokens > max(self.free_pages.numel(), self.size // 8):
            slots = torch.cat([self.free_pages, *self._staged]).sort(stable=True).values  # the quicker one on a CPU
            self.free_pages, self._staged, self._staged_tokens = order_runs(slots, count, self._tally), [], 0
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        return taken

    # -- extents --

    def trim(self) -> None:
        """Give every reserved slot back to the free list."""
        for slots in self._reserved_slots():
            self._stage(slots)
        self._forget_extents()

    def _forget_extents(self) -> None:
        self._start, self._end = [0] * len(self._table), [0] * len(self._table)
        self._reserved_tokens = 0

    def reserved(self, row: int) -> tuple[int, int]:
        """First and last position (exclusive) of a row that hold reserved slots."""
        self._settle()
        return self._start[row], self._end[row]

    def keep_extents_at(self, positions: dict[int, int]) -> None:
        """Keep the extents of these rows that begin at these positions; take back every other."""
        self._settle()
        for row, start in enumerate(self._start):
            if positions.get(row) != start:
                self._drop(row)

    def unreserved_slots(self) -> torch.Tensor:
        """The free list without the extents, in no order."""
        return torch.cat([self.free_pages, *self._staged])

    def replace_unreserved_slots(self, slots: torch.Tensor) -> Callable[[], None]:
        """Make sorted `slots` the free list; return what puts the old one back."""
        before = self.free_pages, self._staged, self._staged_tokens
        self.free_pages, self._staged, self._staged_tokens = longest_first(slots, self._tally), [], 0

        def restore() -> None:
            self.free_pages, self._staged, self._staged_tokens = before

        return restore

    def _reserved_slots(self) -> list[torch.Tensor]:
        self._settle()
        spans = enumerate(zip(self._start, self._end, strict=True))
        return [self._table[row, a:b].to(torch.int64) for row, (a, b) in spans if a < b]

    def _settle(self) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.settle(self._start, self._end)

    def _reclaim_rows(self, rows: Sequence[int]) -> None:
        """Upstream hands rows to new requests: take back what their last owners had reserved."""
        self._settle()
        for row in rows:
            self._drop(row)

    def _drop(self, row: int) -> None:
        start, end = self._start[row], self._end[row]
        if start < end:
            self._stage(self._table[row, start:end].to(torch.int64))
            self._reserved_tokens -= end - start
        self._start[row] = self._end[row] = 0

    def _held(self, want: Want) -> int:
        """Slots reserved from the wanted position on; an extent that begins elsewhere is of no use any more."""
        if self._start[want.row] != want.position:
            self._drop(want.row)
        return self._end[want.row] - self._start[want.row]

    def _ensure_some(self, tree: BasePrefixCache, short: list[Want], everybody: Callable[[], list[Want]]) -> bool:
        """`_ensure` for the rows that are short; for everybody in the batch if extents must be trimmed for it."""
        growth = sum(self._whole_extents(want, self._held(want)) for want in short)
        self.evict_to_free_tokens(tree, growth)
        return self._ensure(short if growth <= self._unreserved() else everybody())

    def _ensure(self, wants: Sequence[Want]) -> bool:
        """Reserve what is needed; whole extents, up to what is wished, while the free list has them."""
        grown = self._grow(wants)
        if grown is None:
            return False
        for want, (held, fresh) in zip(wants, grown, strict=True):
            if fresh is not None:
                self._reserve(want, want.position + held, fresh)
        return True

    def _reserve(self, want: Want, begin: int, slots: torch.Tensor) -> None:
        """Write slots behind what is reserved, or will be, from the wanted position on."""
        end = begin + slots.numel()
        self._table[want.row, begin:end] = slots
        self._start[want.row], self._end[want.row] = want.position, end
        self._reserved_tokens += slots.numel()

    def _grow(self, wants: Sequence[Want]) -> list[tuple[int, torch.Tensor | None]] | None:
        """For each want what is reserved already, and slots taken for the rest; None if the pool is too full."""
        held = [self._held(want) for want in wants]
        counts = [self._whole_extents(want, n) for want, n in zip(wants, held, strict=True)]
        if sum(counts) > self._unreserved():
            counts = [max(want.need - n, 0) for want, n in zip(wants, held, strict=True)]
        if sum(counts) > self._unreserved():
            self.trim()
            held, counts = [0] * len(wants), [want.need for want in wants]
        taken = self._take(sum(counts))
        if taken is None:
            return None
        return [(n, part if part.numel() else None) for n, part in zip(held, taken.split(counts), strict=True)]

    def _whole_extents(self, want: Want, held: int) -> int:
        """Slots to add so that a row reaches its wish in whole extents, within the width of its row."""
        if held >= want.wish:
            return 0
        extents = -(-(want.wish - held) // self.extent_tokens)
        return min(extents * self.extent_tokens, self._width - want.position - held)

    # -- extend, decode and verify --

    def plan_extend(self, batch: ScheduleBatch) -> None:
        """The next `alloc` is for this prefill batch."""
        self._planned = batch

    def give_up(self, reqs: Sequence[Req]) -> None:
        """Take back the extents of these requests, whose rows upstream is about to write itself."""
        self._settle()
        for req in reqs:
            self._drop(req.kv.req_pool_idx)

    def _alloc_extend(self, batch: ScheduleBatch, count: int) -> torch.Tensor | None:
        """Slots of a prefill batch, `[extend_num_tokens]`; the rest of each last extent stays with its request."""
        if count != batch.extend_num_tokens:
            self.give_up(batch.reqs)
            return self._take(count)
        self._settle()
        wants = [
            Want(req.kv.req_pool_idx, prefix, extend, extend + self._half_extent)
            for req, prefix, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        grown = self._grow(wants)
        if grown is None:
            return None
        slots = []
        for want, (held, fresh) in zip(wants, grown, strict=True):
            old = min(held, want.need)
            if old:
                slots.append(self._table[want.row, want.position : want.position + old].to(torch.int64))
            if fresh is not None:
                used = want.need - old  # upstream writes these into the row
                slots.append(fresh[:used])
                self._reserve(want, want.position + held + used, fresh[used:])
            self._start[want.row] = want.position + want.need
            self._reserved_tokens -= old
        return torch.cat(slots) if len(slots) > 1 else slots[0]

    def decode_slots(self, batch: ScheduleBatch) -> torch.Tensor | None:
        """One slot a request, `[requests]` int64, which its row has already; None if upstream must allocate.

        That is if the pool is too full, or if the batch has more than its requests' rows. Many steps are read at once.
        """
        reqs, steps = batch.reqs, self._steps
        if not (isinstance(steps, DecodeSteps) and steps.serves(reqs)):
            self._settle()
            others = batch.seq_lens.shape[0] != len(reqs) or batch.model_config.is_encoder_decoder
            if others or self._rows._aux_cache is not None:
                return None
            steps = self._steps = self._look_ahead(batch)
            if steps is None:
                return None
        slots = steps.slots[steps.done]
        steps.done += 1
        self._reserved_tokens -= len(reqs)
        return slots

    def _look_ahead(self, batch: ScheduleBatch) -> DecodeSteps | None:
        half, start, end = self._half_extent, self._start, self._end
        places = [(req.kv.req_pool_idx, req.kv.kv_allocated_len) for req in batch.reqs]
        short = [Want(row, at, 1, half) for row, at in places if start[row] != at or end[row] - at < half]
        if short:
            tree = batch.tree_cache
            if not self._ensure_some(tree, short, lambda: [Want(row, at, 1, half) for row, at in places]):
                return None
            end = self._end
        steps = min(LOOKAHEAD_STEPS, *[end[row] - at for row, at in places])
        slots = self._table[batch.req_pool_indices, batch.seq_lens + self._ahead[:steps]].to(torch.int64)
        return DecodeSteps(batch.reqs, [row for row, _ in places], slots.unbind())

    def reserve_verify_batch(self, tree_cache: BasePrefixCache, reqs: list[Req], lens: list[int]) -> bool:
        """Have each request's row allocated up to `lens`; False if the pool is too full."""
        rows = [req.kv.req_pool_idx for req in reqs]
        if not (isinstance(self._steps, VerifySteps) and self._steps.rows == rows):
            self._settle()
        before = [req.kv.kv_allocated_len for req in reqs]
        steady = self._steps is not None
        short = [i for i, (row, n) in enumerate(zip(rows, lens, strict=True)) if n > self._end[row] or not steady]
        if short:
            self._settle()
            wants = [Want(row, b, n - b, n - b) for row, b, n in zip(rows, before, lens, strict=True)]
            if not self._ensure_some(tree_cache, [wants[i] for i in short], lambda: wants):
                return False
        self._steps = VerifySteps(rows, lens)
        self._reserved_tokens -= sum(lens) - sum(before)
        return True


def order_runs(slots: torch.Tensor, need: int, tally: torch.Tensor) -> torch.Tensor:
    """Free slots, run by run: those of at least `need` from the shortest on, then the others from the longest on.

    Args:
        slots: `[n]` int64, sorted.
        need: slots that are wanted next.
        tally: `[pool + 1]` int64 of zeros, to work in; it holds zeros again in the end.
    """
    run = slots - torch.arange(slots.numel(), device=slots.device)  # the same within a run, and in no other
    length = tally.scatter_add_(0, run, torch.ones_like(run)).index_select(0, run)
    tally.index_fill_(0, run, 0)
    fit = torch.where(length < need, -length, length - 2 * tally.numel())
    return slots.index_select(0, fit.argsort(stable=True))


def longest_first(slots: torch.Tensor, tally: torch.Tensor) -> torch.Tensor:
    """`order_runs` where nothing is known of what will be wanted."""
    return order_runs(slots, tally.numel(), tally)


def alloc_for_extend(original: Callable[..., Any], batch: ScheduleBatch) -> Any:
    """Around upstream's: its one `alloc` knows which requests it is for."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if isinstance(allocator, ExtentAllocator):
        allocator.plan_extend(batch)
    return original(batch)


def alloc_for_decode(original: Callable[..., Any], batch: ScheduleBatch, token_per_req: int) -> Any:
    """Around upstream's: most steps find their slots in the rows already, and neither allocate nor write."""
    allocator = batch.tree_cache.token_to_kv_pool_allocator
    if isinstance(allocator, ExtentAllocator):
        slots = allocator.decode_slots(batch) if token_per_req == 1 else None
        if slots is not None:
            for req in batch.reqs:
                kv = req.kv
                kv.kv_allocated_len += 1
                kv.kv_committed_len += 1
            return slots
        allocator.give_up(batch.reqs)
    return original(batch, token_per_req)


def alloc_for_spec_decode(original: Callable[..., Any], tree_cache: BasePrefixCache, *args: Any, **kwargs: Any) -> Any:
    """Around upstream's: most steps find their slots in the row already, and neither allocate nor write."""
    allocator = tree_cache.token_to_kv_pool_allocator
    if isinstance(allocator, ExtentAllocator):
        reqs, lens = kwargs["reqs"], kwargs["nxt_kv_lens_cpu"].tolist()
        if allocator.reserve_verify_batch(tree_cache, reqs, lens):
            for req, n in zip(reqs, lens, strict=True):
                req.kv.kv_allocated_len = n
            return None
        allocator.give_up(reqs)
    return original(tree_cache, *args, **kwargs)


def replace_allocator(allocator: Any, rows: ReqToTokenPool, extent_tokens: int) -> Any:
    """The allocator to serve with: ours in place of upstream's plain token allocator, anything else as it is.

    A drafter is given its target's, which is ours by then.
    """
    if not extent_tokens or isinstance(allocator, ExtentAllocator):
        return allocator
    sessions = get_serving().enable_streaming_session  # rows go from turn to turn: not known to be safe with extents
    if type(allocator) is TokenToKVPoolAllocator and not allocator.need_sort and not sessions:
        return ExtentAllocator(allocator, rows, extent_tokens)
    what = f"{type(allocator).__name__} of page size {allocator.page_size}"
    what += ", sorted for PD disaggregation" if allocator.need_sort else ""
    what += ", for --enable-streaming-session" if sessions else ""
    logger.warning("%s=%d has no effect: this server keeps upstream's %s.", EXTENT, extent_tokens, what)
    return allocator

"""Compaction in the scheduler: when it runs, at which point it is safe, and when it refuses and says why.

```
event loop    | ingest | next batch | launch forward n | process result n-1 | ingest | next batch | ...
                      ^ the safe point: result n-1 processed (here, if overlap left it in the queue) and the GPU drained
```
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.kvdefrag import compactor, kv_map, metrics, planner
from sglang_sm120.kvdefrag.census import Census
from sglang_sm120.kvdefrag.settings import Settings, When

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

logger = logging.getLogger(__name__)

COMPACT_KEY = "sm120_kv_compact"
STATE_KEY = "sm120_kv"
WINDOW_UNITS = 1536
"""Of a list that moves, too: this size moves fastest."""
BLOCK_UNITS = 64
"""Of the partial blocks in the census."""
STEPS_BETWEEN_PASSES = 256
"""Scheduler steps from one look at contiguity to the next while serving, at least: 199 steps of 200 carry no pass.
Eight times as many after a look in vain."""
PASS_SHARE = 0.03
"""Of the time of the steps from one pass to the next that a pass may take, so that the mean step grows by less than 5%.
The pass counts as long as it took, and one step longer: draining gives up the overlap of one."""
CPU_MOVE_BYTES_PER_S = 2e9
GPU_MOVE_FRACTION = 0.5
"""Of the memory clock's rate: what one pass assumes to reach when it turns milliseconds into units."""


class Hooks:
    """Functions around upstream's, in the shape of its hook registry; one `Defragmenter` per scheduler."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._defragmenter: Defragmenter | None = None

    def of(self, scheduler: Scheduler) -> Defragmenter:
        """The scheduler's defragmenter, made at its first step, when all pools exist."""
        if self._defragmenter is None:
            self._defragmenter = Defragmenter(scheduler, self._settings)
        return self._defragmenter

    def before_next_batch(
        self, original: Callable[..., Any], scheduler: Scheduler, running_batch: ScheduleBatch, last_batch: Any
    ) -> Any:
        """Around `get_next_batch_to_run`."""
        defragmenter = self.of(scheduler)
        drained = False
        if defragmenter.due():
            drained = defragmenter.drain()
            defragmenter.run_pass()
        plan = original(scheduler, running_batch=running_batch, last_batch=last_batch)
        if drained:
            scheduler.last_batch = None  # the overlap loop must not look for a result that is processed already
        if plan.batch_to_run:
            defragmenter.count_step()
        return plan

    def on_idle(self, original: Callable[..., Any], scheduler: Scheduler) -> Any:
        """Around `on_idle`."""
        self.of(scheduler).when_idle()
        return original(scheduler)

    def set_internal_state(self, original: Callable[..., Any], scheduler: Scheduler, request: Any) -> Any:
        """Around the scheduler's side of `/set_internal_state`, which SGLang's admin key guards."""
        if COMPACT_KEY not in request.server_args:
            return original(scheduler, request)
        from sglang.srt.managers.io_struct import SetInternalStateReqOutput

        return SetInternalStateReqOutput(updated=self.of(scheduler).ask(bool(request.server_args[COMPACT_KEY])))

    def get_internal_state(self, result: Any, scheduler: Scheduler, _request: Any) -> Any:
        """After the scheduler's side of `/server_info`: add what compaction has done."""
        result.internal_state[STATE_KEY] = self.of(scheduler).report()
        return result


class Pace:
    """How many steps lie between two passes while serving, by the seconds that steps and passes take."""

    def __init__(self) -> None:
        self._left = STEPS_BETWEEN_PASSES
        self._seconds = 0.0
        self._steps = 0
        self._last: float | None = None

    def step(self) -> None:
        """A step begins."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds += now - self._last
            self._steps += 1
        self._last = now
        self._left -= 1

    def pause(self) -> None:
        """What comes now, idle time or a pass, is no part of a step."""
        self._last = None

    def allows_a_look(self) -> bool:
        """Whether enough steps have passed."""
        return self._left <= 0

    def wait(self, steps: int) -> None:
        """Let so many steps pass before the next look, and measure them anew."""
        self._left, self._seconds, self._steps, self._last = steps, 0.0, 0, None

    def steps_for(self, pass_seconds: float) -> int:
        """Steps of which a pass as long as this, and the drained step, is `PASS_SHARE`."""
        steps_of_pass = pass_seconds * self._steps / self._seconds if self._seconds else 0.0
        return max(STEPS_BETWEEN_PASSES, math.ceil((1 + steps_of_pass) / PASS_SHARE))


class Defragmenter:
    """Runs passes of compaction for one scheduler."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        self._scheduler = scheduler
        self._settings = settings
        self._refusal = refusal(scheduler)
        self._asked = self._stopped = False
        self._pace = Pace()
        self._idle_done = False
        self._waits_for: str | None = None
        self._in_series = False
        self._before = self._after = torch.empty(0, dtype=torch.int64)
        self._passes = self._units_moved = self._gaps_closed = 0
        self._host_seconds = 0.0
        if self._refusal:
            logger.warning("KV compaction is off: %s", self._refusal)
            return
        page = scheduler.token_to_kv_pool_allocator.page_size
        self._pools = [compactor.Pool(pool_buffers(pool), page) for pool in kv_pools(scheduler)]
        unit_bytes = sum(pool.unit_bytes for pool in self._pools)
        seconds = settings.compact_ms / 1000
        # Where tests force a pass every step, much less is worth moving.
        self._units_per_gap = WINDOW_UNITS if settings.compact is When.EVERY_STEP else planner.UNITS_PER_GAP
        budget_units = int(seconds * move_bytes_per_s(scheduler.device) / (2 * unit_bytes))
        # Ranks that plan differently would soon not agree on when to agree.
        (self._budget_units,) = self._over_ranks([budget_units], torch.distributed.ReduceOp.MIN)

    # -- triggers --

    def ask(self, start: bool) -> bool:
        """Compact at the next safe points until no pass is worth it, or stop all passes until asked to start.

        False, and the reason in the log, where compaction is refused.
        """
        if self._refusal:
            logger.warning("KV compaction refused: %s", self._refusal)
            return False
        self._asked, self._stopped = start, not start
        return True

    def due(self) -> bool:
        """Whether a pass should run before the next batch."""
        if self._refusal or self._stopped:
            return False
        if self._asked or self._settings.compact is When.EVERY_STEP:
            return not self._waits()  # draining for nothing would cost every step its overlap
        if self._settings.compact is not When.AUTO or not self._pace.allows_a_look():
            return False
        if self._contiguity() < self._settings.compact_below:
            return True
        self._pace.wait(STEPS_BETWEEN_PASSES)
        return False

    def count_step(self) -> None:
        """A batch is about to run."""
        self._idle_done = False
        self._pace.step()

    def when_idle(self) -> None:
        """Compact until no pass is worth it; upstream calls this again and again, with time to poll in between."""
        self._pace.pause()
        wanted = self._asked or self._settings.compact in (When.IDLE, When.AUTO)
        if self._refusal or self._stopped or self._idle_done or not wanted or not self._scheduler.is_fully_idle():
            return
        self._idle_done = not self.run_pass()

    # -- a pass --

    def drain(self) -> bool:
        """Process the result that overlap left for later; whether there was one."""
        queue = self._scheduler.result_queue
        if not queue:
            return False
        self._scheduler.process_batch_result(*queue.popleft())
        return True

    def run_pass(self) -> bool:
        """Survey, plan and commit; whether anything was moved. A failure undoes the pass and turns compaction off."""
        if self._waits():
            self._pace.wait(STEPS_BETWEEN_PASSES)
            return False
        self._wait_for_gpu()
        begin = time.perf_counter()
        moves: planner.Plan | None = None
        try:
            survey = compactor.Survey.take(self._holders())
            moves = planner.plan(survey, WINDOW_UNITS, self._budget_units, self._units_per_gap)
            if moves is not None:
                compactor.commit(survey, moves, self._pools)
        except Exception as error:
            self._refusal = f"a pass failed and was undone: {error}"
            logger.exception("KV compaction is off from now on")
        seconds = time.perf_counter() - begin
        # The GPU goes on moving after that, for what the budget allows at most; upstream's next forward waits for it.
        steps = self._agree(self._pace.steps_for(seconds + self._settings.compact_ms / 1000))
        if self._refusal:
            return False
        in_vain = moves is None and not self._asked  # then what is scattered now is likely to stay
        self._pace.wait(8 * steps if in_vain else steps)
        if moves is not None:
            self._account(survey, moves, seconds)
        else:
            self._end_series(survey)
        return moves is not None

    def _agree(self, steps: int) -> int:
        """The most steps that a rank asks to wait, and no more passes anywhere once one has failed on any.

        Ranks that do not move the same KV in the same step would soon differ in what they evict.
        """
        steps, failed = self._over_ranks([steps, bool(self._refusal)], torch.distributed.ReduceOp.MAX)
        if failed and not self._refusal:
            self._refusal = "a pass failed on another rank"
            logger.error("KV compaction is off from now on: %s", self._refusal)
        return steps

    def _over_ranks(self, values: list[int], op: torch.distributed.ReduceOp.RedOpType) -> list[int]:
        """Each value over all ranks of the tensor parallel group, which all ask in the same step."""
        if self._scheduler.server_args.tp_size == 1:
            return values
        everywhere = torch.tensor(values)
        torch.distributed.all_reduce(everywhere, op, self._scheduler.tp_cpu_group)
        return everywhere.tolist()

    def _account(self, survey: compactor.Survey, moves: planner.Plan, seconds: float) -> None:
        segments = len(survey.lengths)
        if not self._in_series:
            self._before = kv_map.owners(survey.owner, segments)
        self._in_series = True
        self._after = kv_map.owners(moves.moved(survey.owner), segments)
        self._passes += 1
        self._units_moved += moves.units_moved
        self._gaps_closed += moves.gaps_closed
        self._host_seconds += seconds
        metrics.count_pass(moves.units_moved, seconds)

    def _end_series(self, survey: compactor.Survey) -> None:
        self._asked = False
        if not self._passes:  # then the picture is of the pool as it is
            self._before = self._after = kv_map.owners(survey.owner, len(survey.lengths))
        if self._in_series:
            self._in_series = False
            metrics.publish(self._census())

    def _holders(self) -> compactor.Holders:
        scheduler = self._scheduler
        kvs = [req.kv for req in scheduler.invariant_checker._requests_owning_rows()]
        table = scheduler.req_to_token_pool.req_to_token
        return compactor.Holders(kvs, table, scheduler.tree_cache, scheduler.token_to_kv_pool_allocator)

    def _census(self) -> Census:
        """Of all running requests' rows."""
        return self._holders().census(BLOCK_UNITS)

    def _contiguity(self) -> float:
        census = self._census()
        metrics.publish(census)
        return census.total.contiguity

    def _waits(self) -> bool:
        """Whether this moment is no safe point. The log says why, once."""
        reason = self._holds_unknown_ids()
        if reason and reason != self._waits_for:
            logger.info("KV compaction waits: %s", reason)
        self._waits_for = reason
        return reason is not None

    def _holds_unknown_ids(self) -> str | None:
        """Why this moment is no safe point, or None."""
        scheduler = self._scheduler
        if scheduler.tree_cache.session_records():
            return "a streaming session holds KV rows"
        if scheduler.token_to_kv_pool_allocator.free_group is not None:
            return "frees are being collected"
        owners = scheduler.invariant_checker._requests_owning_rows()
        if any(req.beam_group is not None for req in owners):
            return "a beam search group holds KV rows"
        rows = scheduler.req_to_token_pool
        if len(owners) != rows.size - len(rows.free_slots):
            return f"{rows.size - len(rows.free_slots)} rows are in use, {len(owners)} belong to known requests"
        return None

    def _wait_for_gpu(self) -> None:
        if torch.device(self._scheduler.device).type == "cuda":
            torch.cuda.synchronize()

    def report(self) -> dict[str, Any]:
        """For `/server_info`: refusal, counts, a census, and the pool before and after the last series of passes."""
        now = None if self._refusal else self._census().total
        return {
            "refused_because": self._refusal,
            "passes": self._passes,
            "units_moved": self._units_moved,
            "gaps_closed": self._gaps_closed,
            "host_seconds": self._host_seconds,
            "contiguity": now.contiguity if now else None,
            "mean_run_length": now.mean_length if now else None,
            "map_before": self._before.tolist(),
            "map_after": self._after.tolist(),
        }


def refusal(scheduler: Scheduler) -> str | None:
    """Why compaction can never run on this server, naming the flag; None if it can."""
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from sglang_sm120.kvdefrag.extents import ExtentAllocator

    args = scheduler.server_args
    for flag, what in HOLDERS_ELSEWHERE.items():
        if getattr(args, flag):
            return f"--{flag.replace('_', '-')}: {what}"
    if args.disaggregation_mode != "null":
        return f"--disaggregation-mode {args.disaggregation_mode}: transfers hold KV ids"
    if args.pp_size > 1:
        return f"--pp-size {args.pp_size}: microbatches in flight hold KV ids"
    if args.dcp_size > 1:
        return f"--dcp-size {args.dcp_size}: a KV id names a slot of one of several ranks"
    if args.kv_canary != "none":
        return f"--kv-canary {args.kv_canary}: it checks KV by its id"
    allocator = scheduler.token_to_kv_pool_allocator
    if type(allocator) not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, ExtentAllocator):
        return f"the KV allocator of this model is {type(allocator).__name__}, which is not known to compaction"
    for pool in kv_pools(scheduler):
        if type(pool) not in (MLATokenToKVPool, MHATokenToKVPool):
            return f"a KV pool of this model is {type(pool).__name__}, which is not known to compaction"
        scales = (getattr(pool, name, None) for name in ("k_scale_buffer", "native_k_scale_buffer"))
        if getattr(pool, "use_hnd", False) or any(scale is not None for scale in scales):
            return f"the {type(pool).__name__} of this model keeps heads or scales apart; that is not moved"
    return None


HOLDERS_ELSEWHERE = {
    "enable_unified_memory": "its pool compacts itself through virtual ids",
    "radix_cache_backend": "its prefix cache is not known to compaction",
    "enable_hierarchical_cache": "transfers to and from the host hold KV ids",
    "enable_lmcache": "transfers to and from LMCache hold KV ids",
    "enable_flexkv": "transfers to and from FlexKV hold KV ids",
    "enable_unified_cache_external_linker": "transfers to and from the linked store hold KV ids",
    "enable_hisparse": "its swap space holds KV ids",
    "enable_pdmux": "two event loops share the pool",
    "enable_dp_attention": "ranks would have to compact in the same step, which is not built",
    "enable_return_routed_experts": "it keeps the experts of each token by its KV id",
    "enable_return_indexer_topk": "it keeps the indexer's choices for each token by its KV id",
}


def kv_pools(scheduler: Scheduler) -> list[Any]:
    """Every KV pool that is indexed by the scheduler's slot ids: the target's and the draft models'."""
    pools = [scheduler.token_to_kv_pool_allocator.get_kvcache()]
    if scheduler.draft_worker is not None:
        pools += [runner.token_to_kv_pool for runner in scheduler.draft_worker._draft_model_runners()]
    return pools


def pool_buffers(pool: Any) -> list[torch.Tensor]:
    """Buffers of an upstream KV pool, layer by layer, slots first."""
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def move_bytes_per_s(device: str) -> float:
    """Bytes a second, read and written, that a move is planned with."""
    if torch.device(device).type != "cuda":
        return CPU_MOVE_BYTES_PER_S
    properties = torch.cuda.get_device_properties(device)
    bus_bytes = properties.memory_bus_width / 8
    return 2 * properties.memory_clock_rate * 1000 * bus_bytes * GPU_MOVE_FRACTION

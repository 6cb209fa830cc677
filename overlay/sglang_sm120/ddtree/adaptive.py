"""The running side of `budget`: measures costs at start, captures each width, reports steps' times and outcomes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_sm120.ddtree.budget import StepCosts, WidthPolicy, offered_widths
from sglang_sm120.ddtree.verify import TreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_sm120.ddtree.tree import DraftTree, Path
    from sglang_sm120.ddtree.worker import DDTreeWorker

SHORTEST_CONTEXT_TOKENS, SHORT_CONTEXT_TOKENS = 2, 64
BATCH_SIZES = (1, 4, 16, 64)
# Context tokens of a batch in the long measurement: a CPU is for trying it out.
CONTEXT_TOKENS = {"cuda": 131_072, "cpu": 2048}
# The widths are measured in turns, so that a busy moment does not befall one alone. Rounds, steps of each that are
# timed, and what the device spins first, so that the host has launched them all by then.
ROUNDS, REPEATS, HEAD_START_CYCLES = 3, 3, 40_000_000
ID_STRIDE = 7919
# Results are read this many steps later: under overlap scheduling their step is over then on every rank.
LAG_STEPS = 2
# Under tensor parallelism rank 0 tells its step times this many at a time.
TOLD_STEPS = 16


@dataclass
class _Mark:
    """A moment in the stream of work."""

    event: Any  # None on a CPU, which has done what it was told to do
    seconds: float

    @classmethod
    def now(cls, device: str) -> _Mark:
        """After what was launched so far."""
        if device == "cpu":
            return cls(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event, 0.0)

    def wait(self) -> None:
        """Until the device has got here."""
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: _Mark) -> float:
        """Seconds from another mark to this one; both have passed."""
        if self.event is None:
            return self.seconds - earlier.seconds
        return 1e-3 * earlier.event.elapsed_time(self.event)


@dataclass
class _Step:
    """A step on its way to the host.

    load: requests, and context tokens of all of them. drafted: nodes `[B, D + 1]` of the path and the drafter's
    log-probabilities `[B, Q]`; None where nothing was drafted. ended, before: at its end, and that of the step before.
    """

    width: int
    load: tuple[int, int]
    drafted: tuple[Tensor, Tensor] | None
    ended: _Mark
    before: _Mark | None


def outcome(nodes: Tensor, masses: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of a step's `drafted`: probabilities of the nodes by the drafter, and which were accepted; `[B, Q]` both."""
    accepted = np.zeros(masses.shape, dtype=bool)
    np.put_along_axis(accepted, nodes.numpy(), True, axis=1)
    return np.exp(masses.numpy()), accepted


def _to_host(values: Tensor) -> Tensor:
    """A copy that is there once the stream has got that far."""
    if not values.is_cuda:
        return values
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return on_host.copy_(values, non_blocking=True)


class AdaptiveWidth:
    """Chooses the verify width of each step and holds the graph of each width."""

    def __init__(self, worker: DDTreeWorker) -> None:
        self.worker = worker
        self.runner = worker.model_runner
        device = torch.device(worker.device).type
        self._context_tokens = CONTEXT_TOKENS[device]
        # Far apart, so that an MoE layer reads as many experts for them as for a text.
        apart = torch.arange(max(BATCH_SIZES) * max(worker.widest, worker.block_size), device=device) * ID_STRIDE
        self._ids = apart % self.runner.model_config.vocab_size
        widths = offered_widths(worker.block_size, worker.widest)
        self._graphs = {width: self._graph(width) for width in widths}
        self._pending: deque[_Step] = deque()
        self._timed: list[tuple[int, int, int, float]] = []
        self._before: tuple[int, _Mark] | None = None  # width and end of the step before
        self._load = (0, 0)
        self.policy = WidthPolicy(widths, self._measure(widths))

    def choose(self, batch: ScheduleBatch) -> int:
        """The width for this step; makes its graph the current one."""
        while len(self._pending) > LAG_STEPS:
            self._hear(self._pending.popleft())
        lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
        self._load = len(lens), int(lens.sum())
        width = self.policy.choose(*self._load)
        self._use(width)
        return width

    def record(self, path: Path, drafted: DraftTree, width: int) -> None:
        """Start the way to the host of a step's end, and of what it drafted and accepted, if anything."""
        if width == 1:
            self.policy.pass_over(len(path.nodes))
        sent = (_to_host(path.nodes), _to_host(drafted.masses)) if width > 1 else None
        ended = _Mark.now(self.worker.device)
        # How long a step takes depends on the one before, which the host may have launched it beside.
        before = self._before[1] if self._before and self._before[0] == width else None
        self._pending.append(_Step(width, self._load, sent, ended, before))
        self._before = width, ended

    def interrupt(self) -> None:
        """Something else runs before the next step."""
        self._before = None

    def _hear(self, step: _Step) -> None:
        """Tell the policy of a step that is over. Rank 0's times hold for all ranks."""
        step.ended.wait()
        if step.before is not None:
            self._timed.append((step.width, *step.load, step.ended.since(step.before)))
        if step.drafted is not None:
            self.policy.observe(step.width, *outcome(*step.drafted))
        group = get_parallel().tp_group
        if len(self._timed) >= (TOLD_STEPS if group.world_size > 1 else 1):
            if group.world_size > 1:
                self._timed = group.broadcast_object(self._timed, src=0)
            for timed in self._timed:
                self.policy.learn(*timed)
            self._timed = []

    def _use(self, width: int) -> None:
        self.runner.decode_cuda_graph_runner = self._graphs[width]

    def _graph(self, width: int) -> Any:
        """The decode graph runner of a width: upstream's for the widest, one more for each other, or None."""
        current = self.runner.decode_cuda_graph_runner
        if width == self.worker.widest or current is None:
            return current
        return type(current)(self.runner, attn_backend=self.runner.attn_backend, speculative_num_draft_tokens=width)

    def _measure(self, widths: list[int]) -> StepCosts:
        """Time verify (and draft, for widths above 1) over empty pools; rank 0's figures hold for all ranks."""
        fit = self.runner.token_to_kv_pool.size // (SHORTEST_CONTEXT_TOKENS + self.worker.widest)
        limit = max(1, min(self.runner.max_running_requests, fit))
        sizes = sorted({min(size, limit) for size in BATCH_SIZES})
        lines = {size: self._lines(widths, size) for size in sizes}
        seconds = {width: {size: lines[size][width] for size in sizes} for width in widths}
        self._use(self.worker.widest)
        for runner in (self.runner, self.worker.draft_model_runner):
            runner.req_to_token_pool.req_to_token.zero_()
        group = get_parallel().tp_group
        if group.world_size > 1:
            seconds = group.broadcast_object(seconds, src=0)
        return StepCosts(seconds)

    def _lines(self, widths: list[int], batch_size: int) -> dict[int, tuple[float, float]]:
        """By width, (seconds at no context, seconds a context token) through a short and a long measurement."""
        slots = min(self.runner.token_to_kv_pool.size, self._context_tokens)
        room = min(self.runner.model_config.context_len, slots // batch_size) - 2 * self.worker.widest
        longest = max(SHORTEST_CONTEXT_TOKENS, room)
        short = min(SHORT_CONTEXT_TOKENS, longest // 2)
        near, far = (self._fastest(widths, batch_size, tokens) for tokens in (short, longest))
        lines = {}
        for width in widths:
            slope = max(0.0, far[width] - near[width]) / (batch_size * (longest - short))
            lines[width] = max(near[width] - slope * batch_size * short, 1e-9), slope
        return lines

    def _fastest(self, widths: list[int], batch_size: int, context_tokens: int) -> dict[int, float]:
        """Seconds of each width's fastest step, as somebody else may use the device."""
        rounds = [{w: self._seconds(w, batch_size, context_tokens) for w in widths} for _ in range(ROUNDS)]
        return {width: min(seconds[width] for seconds in rounds) for width in widths}

    def _seconds(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Device seconds of a step, host time hidden as overlap scheduling hides it; on a CPU, seconds."""
        self._use(width)

        def step() -> None:
            if width > 1:
                self._dummy_forward(self.worker.draft_model_runner, self.worker.block_size, batch_size, context_tokens)
            self._dummy_forward(self.runner, width, batch_size, context_tokens)

        step()
        if self.worker.device == "cpu":
            begun = time.perf_counter()
            step()
            return time.perf_counter() - begun
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        torch.cuda._sleep(HEAD_START_CYCLES)
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        marks[-1].synchronize()
        return 1e-3 * min(begin.elapsed_time(end) for begin, end in pairwise(marks))

    def _dummy_forward(self, runner: Any, width: int, batch_size: int, context_tokens: int) -> None:
        """A verify-mode pass of `width` tokens a request over slots that hold nothing yet."""
        is_draft = runner is self.worker.draft_model_runner
        if is_draft and self.worker.use_compact_draft_cache:
            context_tokens = min(context_tokens, self.worker.draft_window_size)
        device, end = self.worker.device, context_tokens + width
        table = runner.req_to_token_pool.req_to_token
        table[:batch_size, :end] = 1 + torch.arange(batch_size * end, dtype=table.dtype, device=device).view(-1, end)
        rows = torch.arange(batch_size, device=device)
        lens = torch.full((batch_size,), context_tokens, dtype=torch.int64, device=device)
        slots = table[:batch_size, context_tokens:end].flatten().long()
        host_lens = torch.full((batch_size,), end, dtype=torch.int32)
        ids = self._ids[: batch_size * width]
        spec_info = (
            self.worker._draft_block_spec_info
            if is_draft
            else TreeVerifyInput(draft_token=ids, positions=None, draft_token_num=width)
        )
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=batch_size,
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=slots,
            seq_lens_sum=int(host_lens.sum()),
            seq_lens_cpu=host_lens,
            positions=(lens[:, None] + torch.arange(width, device=device)).flatten(),
            input_embeds=self.worker.embed(ids.view(batch_size, width)) if is_draft else None,
            spec_algorithm=self.runner.spec_algorithm,
            spec_info=spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL if is_draft else CaptureHiddenMode.FULL,
            global_num_token_non_padded_cpu=batch_size * width,
            can_run_decode_cuda_graph=True,
        )
        plan = runner.kv_index_translator.plan(
            req_pool_indices=rows, seq_lens=lens, seq_lens_cpu=host_lens, write_virtual=slots, read_extent=width
        )
        plan.bind(forward_batch, runner.kv_index_translator)
        with torch.inference_mode():
            runner.forward(forward_batch)

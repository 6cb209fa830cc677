"""The running side of `budget`: measures step costs at start-up, captures each width, and reports what was accepted."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel, get_schedule
from torch import Tensor

from sglang_sm120.ddtree.budget import StepCosts, WidthPolicy, offered_widths
from sglang_sm120.ddtree.verify import TreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_sm120.ddtree.tree import DraftTree, Path
    from sglang_sm120.ddtree.worker import DDTreeWorker

SHORT_CONTEXT_TOKENS = 64
BATCH_SIZES = (1, 4, 16, 64)
# Context tokens of a batch in the long measurement: a CPU is for trying it out.
CONTEXT_TOKENS = {"cuda": 131_072, "cpu": 2048}
# Steps a measurement, and what the device spins first, so that the host has launched them all when they are timed.
REPEATS, HEAD_START_CYCLES = 5, 40_000_000
ID_STRIDE = 7919
# Results are read this many steps later: under overlap scheduling their step is over then on every rank.
LAG_STEPS = 2
# Step times are looked at over so many steps that all draft, or all do not.
PACE_STEPS = 16


@dataclass
class _Outcome:
    """A step on its way to the host: its width, path nodes `[B, D + 1]`, and drafter's log-probabilities `[B, Q]`."""

    width: int
    nodes: Tensor
    masses: Tensor
    arrived: Any

    @classmethod
    def send(cls, width: int, nodes: Tensor, masses: Tensor) -> _Outcome:
        """Start the copies."""
        if not nodes.is_cuda:
            return cls(width, nodes, masses, None)
        on_host = _to_pinned(nodes), _to_pinned(masses)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(width, *on_host, arrived)

    def read(self) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of the nodes, and which were accepted; `[B, Q]` both."""
        if self.arrived is not None:
            self.arrived.synchronize()
        masses = self.masses.numpy()
        accepted = np.zeros(masses.shape, dtype=bool)
        np.put_along_axis(accepted, self.nodes.numpy(), True, axis=1)
        return np.exp(masses), accepted


def _to_pinned(values: Tensor) -> Tensor:
    on_host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    on_host.copy_(values, non_blocking=True)
    return on_host


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
        self._steps = 0
        self._pending: deque[tuple[int, _Outcome]] = deque()
        self.policy = WidthPolicy(widths, self._measure(widths))
        self._host_is_hidden = device == "cuda" and not get_schedule().disable_overlap_schedule
        if self._host_is_hidden:
            self.policy.costs.forget()
        self._drafts = False
        self._pace: list[tuple[float, float, bool]] = []  # begin, expected seconds, was the GPU idle; since then
        self._end = torch.get_device_module(device).Event()

    def choose(self, batch: ScheduleBatch) -> int:
        """The width for this step; makes its graph the current one."""
        self._steps += 1
        while self._pending and self._pending[0][0] <= self._steps:
            _, outcome = self._pending.popleft()
            probabilities, accepted = outcome.read()
            self.policy.observe(outcome.width, probabilities, accepted)
        lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
        batch_size, context_tokens = len(lens), int(lens.sum())
        width = self.policy.choose(batch_size, context_tokens)
        if self._host_is_hidden:
            self._watch_pace(width > 1, self.policy.costs.on_device(width, batch_size, context_tokens))
        self._use(width)
        return width

    def record(self, path: Path, drafted: DraftTree, width: int) -> None:
        """Start the way of what was drafted and accepted to the host, if anything was."""
        self._end.record()
        if width > 1:
            self._pending.append((self._steps + LAG_STEPS + 1, _Outcome.send(width, path.nodes, drafted.masses)))
        else:
            self.policy.pass_over(len(path.nodes))

    def _watch_pace(self, drafts: bool, device_seconds: float) -> None:
        """Learn what steps really take, with a draft and without: what the host needs, or else the GPU.

        If it needs the GPU longer than the host, the host finds it busy when it begins a step. How long a step takes
        shows in those that follow, so the first of a kind do not count; the median does, as prompts come between some.
        Rank 0's figures hold for all ranks.
        """
        if drafts != self._drafts:
            self._drafts, self._pace = drafts, []
        self._pace.append((time.perf_counter(), device_seconds, self._end.query()))
        if len(self._pace) <= LAG_STEPS + PACE_STEPS:
            return
        begun, expected, idle = np.array(self._pace[LAG_STEPS:]).T
        self._pace = []
        self.policy.costs.learn(drafts, float(np.median(np.diff(begun))), float(np.median(expected)), idle.mean() > 0.5)
        group = get_parallel().tp_group
        if group.world_size > 1:
            costs = self.policy.costs
            costs.timed, costs.learned = group.broadcast_object((costs.timed, costs.learned), src=0)

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
        limit = self.runner.max_running_requests
        sizes = sorted({min(size, limit) for size in BATCH_SIZES})
        seconds = {width: {size: self._line(width, size) for size in sizes} for width in widths}
        self._use(self.worker.widest)
        for runner in (self.runner, self.worker.draft_model_runner):
            runner.req_to_token_pool.req_to_token.zero_()
        group = get_parallel().tp_group
        if group.world_size > 1:
            seconds = group.broadcast_object(seconds, src=0)
        return StepCosts(seconds)

    def _line(self, width: int, batch_size: int) -> tuple[float, float]:
        """(seconds at no context, seconds a context token) through a short and a long measurement."""
        slots = min(self.runner.token_to_kv_pool.size, self._context_tokens)
        longest = max(2, min(self.runner.model_config.context_len, slots // batch_size) - 2 * self.worker.widest)
        short = min(SHORT_CONTEXT_TOKENS, longest // 2)
        near, far = (self._seconds(width, batch_size, tokens) for tokens in (short, longest))
        slope = max(0.0, far - near) / (batch_size * (longest - short))
        return max(near - slope * batch_size * short, 1e-9), slope

    def _seconds(self, width: int, batch_size: int, context_tokens: int) -> float:
        """Device seconds of a step, host time hidden as overlap scheduling hides it; on a CPU, seconds.

        The fastest of some counts, as somebody else may use the GPU.
        """
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

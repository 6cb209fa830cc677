"""The running side of `budget`: measures step costs at start-up, captures each width, and reports what was accepted."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_sm120.ddtree.budget import StepCosts, WidthPolicy, offered_widths
from sglang_sm120.ddtree.verify import TreeVerifyInput

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_sm120.ddtree.tree import Path
    from sglang_sm120.ddtree.worker import DDTreeWorker

SHORT_CONTEXT_TOKENS = 64
BATCH_SIZES = (1, 4, 16, 64)
# Repeats of a measurement, and context tokens of a batch in the long one: a CPU is for trying it out.
EFFORT = {"cuda": (5, 131_072), "cpu": (1, 2048)}
# Counts are read this many steps later: under overlap scheduling their step is over then on every rank, without a wait.
LAG_STEPS = 2


class AdaptiveWidth:
    """Chooses the verify width of each step and holds the graph of each width."""

    def __init__(self, worker: DDTreeWorker) -> None:
        self.worker = worker
        self.runner = worker.model_runner
        self._repeats, self._context_tokens = EFFORT[torch.device(worker.device).type]
        widths = offered_widths(worker.block_size, worker.widest)
        self._graphs = {width: self._graph(width) for width in widths}
        self._pending: deque[tuple[int, int, Tensor, Any]] = deque()
        self.policy = WidthPolicy(widths, self._measure(widths))

    def choose(self, batch: ScheduleBatch) -> int:
        """The width for this step; makes its graph the current one."""
        while len(self._pending) > LAG_STEPS:
            width, batch_size, counts, copied = self._pending.popleft()
            if copied is not None:
                copied.synchronize()
            self.policy.observe(width, counts.tolist(), batch_size)
        lens = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.spec_info.nxt_kv_lens_cpu
        width = self.policy.choose(len(lens), int(lens.sum()))
        self._use(width)
        return width

    def record(self, path: Path, width: int) -> None:
        """Count the accepted nodes of this step, and start their way to the host."""
        inside = torch.arange(path.nodes.shape[1], device=path.nodes.device) < path.commit_lens[:, None]
        counts = torch.zeros(width, dtype=torch.int32, device=path.nodes.device)
        counts.scatter_add_(0, path.nodes.flatten(), inside.flatten().int())
        copied = None
        if counts.is_cuda:
            on_host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
            on_host.copy_(counts, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
            counts = on_host
        self._pending.append((width, len(path.nodes), counts, copied))

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
        self.runner.req_to_token_pool.req_to_token.zero_()
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
        self._use(width)
        times = []
        for _ in range(self._repeats):
            self._synchronize()
            begin = time.perf_counter()
            if width > 1:
                self._dummy_forward(self.worker.draft_model_runner, self.worker.block_size, batch_size, context_tokens)
            self._dummy_forward(self.runner, width, batch_size, context_tokens)
            self._synchronize()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def _synchronize(self) -> None:
        if self.worker.device != "cpu":
            torch.cuda.synchronize()

    def _dummy_forward(self, runner: Any, width: int, batch_size: int, context_tokens: int) -> None:
        """A verify-mode pass of `width` tokens a request over slots that hold nothing yet."""
        device, end = self.worker.device, context_tokens + width
        table = self.runner.req_to_token_pool.req_to_token
        table[:batch_size, :end] = 1 + torch.arange(batch_size * end, dtype=table.dtype, device=device).view(-1, end)
        rows = torch.arange(batch_size, device=device)
        lens = torch.full((batch_size,), context_tokens, dtype=torch.int64, device=device)
        slots = table[:batch_size, context_tokens:end].flatten().long()
        host_lens = torch.full((batch_size,), end, dtype=torch.int32)
        ids = torch.zeros(batch_size * width, dtype=torch.int64, device=device)
        is_draft = runner is self.worker.draft_model_runner
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

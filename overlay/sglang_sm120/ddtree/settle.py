"""A greedy step's walk, KV moves and draft KV as the tail of the target's graph: nothing is launched after its replay.

A step that samples, or whose logits are changed first, runs the graph with the tail disarmed (it then moves and commits
nothing) and settles outside of it, by the same code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from sglang_sm120.ddtree.tree import Path

if TYPE_CHECKING:
    from sglang_sm120.ddtree.worker import DDTreeWorker


class CapturedSettler:
    """One per worker; upstream calls `capture` at the end of each target graph it records, a width and batch each."""

    def __init__(self, worker: DDTreeWorker) -> None:
        self._worker = worker
        self._is_live = torch.zeros(1, dtype=torch.int32, device=worker.device)
        self._is_armed = False
        self._paths: dict[tuple[int, int], tuple[Path, torch.Tensor]] = {}
        worker.model_runner.capture_tail_hooks.append(self.capture)

    def capture(self, graph_runner: Any, output: Any, forward_batch: Any, _num_tokens: int) -> None:
        """Record the settling of greedy choices; the path stays in memory of its own, what outlives the step in one."""
        batch, width = forward_batch.batch_size, graph_runner.captured_req_width
        path = self._worker.settle(
            forward_batch.input_ids.view(batch, width),
            output.next_token_logits.argmax(-1).view(batch, width),
            forward_batch.out_cache_loc.view(batch, width),
            forward_batch.seq_lens,
            output.hidden_states,
            self._is_live,
        )
        outlives = torch.cat([path.tokens.flatten(), path.bonus, path.ends, path.commit_lens])
        self._paths[width, batch] = path, outlives

    def arm(self, is_armed: bool) -> bool:
        """Let the next replay settle, or not; returns `is_armed`."""
        if is_armed != self._is_armed:
            self._is_live.fill_(int(is_armed))
            self._is_armed = is_armed
        return is_armed

    def path(self, batch: int, width: int) -> Path:
        """What the last replay of this width committed, for its first `batch` requests.

        What outlives the step is copied, all at once: the next replay writes to the same memory.
        """
        size = min(size for w, size in self._paths if w == width and size >= batch)
        captured, outlives = self._paths[width, size]
        tokens, *vectors = outlives.clone().split([captured.tokens.numel(), size, size, size])
        bonus, ends, commit_lens = (vector[:batch] for vector in vectors)
        own = dataclasses.replace(captured, **{f.name: getattr(captured, f.name)[:batch] for f in fields(Path)})
        kept = {"tokens": tokens.view_as(captured.tokens)[:batch], "bonus": bonus, "ends": ends}
        return dataclasses.replace(own, **kept, commit_lens=commit_lens)

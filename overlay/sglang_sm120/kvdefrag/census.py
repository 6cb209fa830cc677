"""How scattered the KV of a pool is. Everything is counted on the pool's device; one small copy reaches the host.

A run is a maximal stretch of a request's units, in token order, with consecutive ids. A unit is a page of the
allocator, so a slot where the page size is 1. Contiguity is `1 - (runs - 1) / (units - 1)`: 1 for one run, 0 if no two
units adjoin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Runs:
    """Units and runs of one request, or summed over several."""

    units: int
    runs: int

    @property
    def mean_length(self) -> float:
        """Units a run; 0 where there are none."""
        return self.units / self.runs if self.runs else 0.0

    @property
    def contiguity(self) -> float:
        """0 to 1; 1 where there is nothing to scatter."""
        return 1 - (self.runs - 1) / (self.units - 1) if self.units > 1 else 1.0


@dataclass(frozen=True)
class Census:
    """One reading of a pool. Partial blocks are aligned blocks of units that are neither all free nor all used."""

    requests: tuple[Runs, ...]
    free: Runs
    largest_free_run: int
    partial_blocks: int

    @property
    def total(self) -> Runs:
        """All requests together; a unit that two share counts twice."""
        return Runs(sum(r.units for r in self.requests), sum(r.runs for r in self.requests))


def take(requests: Sequence[torch.Tensor], free: torch.Tensor, pool_units: int, block: int) -> Census:
    """Count runs; waits once, for one vector of `len(requests) + 3` counts.

    Args:
        requests: per request, `[units]` integer ids in token order.
        free: `[n]` integer ids of the free units, in any order, none twice.
        pool_units: units that can be handed out; their ids are 1 to `pool_units`.
        block: units of an aligned block, for `partial_blocks`.
    """
    is_free = torch.zeros(pool_units + 1, dtype=torch.bool, device=free.device)
    is_free[free.long()] = True
    counts = torch.cat([run_counts(requests, free.device), _free_counts(is_free, block)]).tolist()
    runs = tuple(Runs(len(r), n) for r, n in zip(requests, counts, strict=False))
    free_runs, largest, partial = counts[len(requests) :]
    return Census(runs, Runs(len(free), free_runs), largest, partial)


def run_counts(requests: Sequence[torch.Tensor], device: torch.device | str) -> torch.Tensor:
    """Runs of each list of ids: `[len(requests)]` int64 on the device."""
    if not requests:
        return torch.zeros(0, dtype=torch.int64, device=device)
    ids = torch.cat([r.long() for r in requests])
    ends = torch.tensor([len(r) for r in requests]).cumsum(0).to(device)
    starts = torch.nn.functional.pad(ends[:-1], (1, 0))
    begins_run = torch.ones(len(ids) + 1, dtype=torch.int64, device=device)  # the last is a target for empty lists
    begins_run[1:-1] = ids[1:] != ids[:-1] + 1
    begins_run[starts] = 1
    before = torch.nn.functional.pad(begins_run[:-1].cumsum(0), (1, 0))
    return before[ends] - before[starts]


def _free_counts(is_free: torch.Tensor, block: int) -> torch.Tensor:
    """Free runs, the longest of them, partial blocks: `[3]` int64. Entry 0 of `is_free [1 + units]` is False."""
    index = torch.arange(len(is_free), device=is_free.device)
    run_so_far = index - torch.where(is_free, 0, index).cummax(0).values
    begins_run = is_free[1:] & ~is_free[:-1]
    whole = (len(is_free) - 1) // block * block
    used_in_block = (~is_free[1 : 1 + whole]).view(-1, block).sum(1)
    partial = (used_in_block > 0) & (used_in_block < block)
    return torch.stack([begins_run.sum(), run_so_far.max(), partial.sum()])

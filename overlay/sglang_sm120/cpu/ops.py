"""PyTorch versions of the `sgl_kernel` functions that the CPU engine calls, under upstream's names and signatures."""

from __future__ import annotations

import ctypes

from torch import Tensor


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, _row_width: int
) -> None:
    """Write consecutive runs of `slots [n]` to `req_to_token[row, start:end]`, one a request; rows, bounds: `[B]`."""
    at = 0
    for row, begin, stop in _runs(req_pool_indices, start, end):
        req_to_token[row, begin:stop] = slots[at : at + stop - begin]
        at += stop - begin


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor, req_to_token: Tensor, start: Tensor, end: Tensor, slots: Tensor, _row_width: int
) -> None:
    """Read `req_to_token[row, start:end]` of each request into `slots [n]`, one run after the other."""
    at = 0
    for row, begin, stop in _runs(req_pool_indices, start, end):
        slots[at : at + stop - begin] = req_to_token[row, begin:stop]
        at += stop - begin


def copy_all_layer_kv_cache_cpu(buffers: Tensor, row_bytes: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Copy slots `sources [n]` to `targets [n]` in each layer's buffer, as if all were read before one is written.

    buffers, row_bytes: `[layers]` integers, address of each buffer and bytes of one slot in it.
    """
    for address, size in zip(buffers.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + slot * size, size) for slot in sources.tolist()]
        for slot, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + slot * size, row, size)


def _runs(rows: Tensor, start: Tensor, end: Tensor) -> zip[tuple[int, int, int]]:
    return zip(rows.tolist(), start.tolist(), end.tolist(), strict=True)

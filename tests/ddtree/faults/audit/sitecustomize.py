"""Put on PYTHONPATH, this audits every DDTREE step inside the scheduler, and stops it at the first thing that is wrong.

Checked before each walk: no request reads or writes a free slot or another request's, no window slot belongs to the
prefix cache, the KV of every cached slot hashes to what it did when it was cached, and the drafter's KV is finite.
A request called LAST, alone in the server, also checks that free + used slots are all there are.
DDTREE_AUDIT names the file for the counts. DDTREE_AUDIT_FAULT=1 overwrites a cached slot once, to be found out.
"""

import json
import os
import sys
from pathlib import Path

import torch
from sglang_sm120.ddtree import tree

LAST = "audit-last"


class Audit:
    def __init__(self):
        self.hashes = {}
        self.counts = {"request_steps": 0, "accepted": 0, "rejected": 0, "cached_slots_checked": 0, "conserved": 0}
        self.watched = set()

    def step(self, step, path):
        batch, allocator = step.batch, step.batch.token_to_kv_pool_allocator
        self.watch(allocator)
        page = allocator.page_size
        free = set(allocator.get_all_free_pages().tolist())
        cached = set(batch.tree_cache.all_values_flatten().tolist())
        table = step.runner.req_to_token_pool.req_to_token
        owner = {}
        for req, row, window in zip(batch.reqs, batch.req_pool_indices.tolist(), step.slots.tolist(), strict=True):
            end = req.kv.kv_allocated_len
            read = table[row, :end].tolist()
            require(0 not in window and set(window) <= set(read), f"{req.rid} writes slots that it did not reserve")
            require(not set(window) & cached, f"{req.rid} writes a cached slot")
            require(not {slot // page for slot in read} & free, f"{req.rid} reads a free slot")
            for slot in set(read) - cached:
                require(owner.setdefault(slot, req.rid) == req.rid, f"{req.rid} and {owner[slot]} share slot {slot}")
        self.check_cached(step, sorted(cached))
        if [req.rid for req in batch.reqs] == [LAST]:
            used = cached | set(read)
            require(len(free) * page + len(used) == allocator.size, f"{len(free) * page} + {len(used)} slots")
            self.counts["conserved"] += 1
        self.counts["request_steps"] += len(batch.reqs)
        accepted = int(path.commit_lens.sum()) - len(batch.reqs)
        self.counts["accepted"] += accepted
        self.counts["rejected"] += len(batch.reqs) * (step.width - 1) - accepted
        Path(os.environ["DDTREE_AUDIT"]).write_text(json.dumps(self.counts))

    def watch(self, allocator):
        """A slot that is handed out will be written: forget what it held."""
        if id(allocator) in self.watched:
            return
        self.watched.add(id(allocator))
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            if hasattr(allocator, name):
                setattr(allocator, name, self.forgetting(getattr(allocator, name)))

    def forgetting(self, alloc):
        def call(*args, **kwargs):
            slots = alloc(*args, **kwargs)
            for slot in () if slots is None else slots.tolist():
                self.hashes.pop(slot, None)
            return slots

        return call

    def check_cached(self, step, slots):
        index = torch.tensor(slots, dtype=torch.int64)
        rows = torch.cat([buffer[index].flatten(1) for buffer in step.runner.token_to_kv_pool.kv_buffer], dim=1)
        weights = torch.arange(1, rows.shape[1] + 1, dtype=torch.int64)
        hashes = (rows.view(torch.int32).long() * weights).sum(1).tolist()
        for slot, value in zip(slots, hashes, strict=True):
            require(self.hashes.setdefault(slot, value) == value, f"the KV of cached slot {slot} was changed")
        draft = step.worker.draft_model_runner.token_to_kv_pool
        require(all(bool(b[index].isfinite().all()) for b in draft.k_buffer + draft.v_buffer), "draft KV is not finite")
        self.counts["cached_slots_checked"] += len(slots)
        if os.environ.get("DDTREE_AUDIT_FAULT") and len(slots) > 20:
            step.runner.token_to_kv_pool.kv_buffer[0][slots[10]] += 1.0


def require(condition, what):
    if not condition:
        raise AssertionError(f"audit: {what}")


audit, _walk = Audit(), tree.walk


def _audited_walk(*args):
    path = _walk(*args)
    # The step's run() called the worker's settle(), which called the walk.
    audit.step(sys._getframe(2).f_locals["self"], path)
    return path


tree.walk = _audited_walk

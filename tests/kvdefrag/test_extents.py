"""Tier 0 under random schedules of upstream's own pools and prefix cache."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang_sm120.kvdefrag import extents
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from tests.kvdefrag import schedules
from tools.churn import World


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([96, 200, 600]),
    extent=st.sampled_from([1, 4, 16, 100]),
    block=st.sampled_from([0, 0, 5]),
)
def test_random_schedules_keep_every_invariant(seed, size, extent, block):
    world = World(size, max_requests=5, max_context=160, verify_block=block, extent_tokens=extent, seed=seed)
    schedules.run(world, 30, schedules.check)


@pytest.mark.parametrize("block", [0, 5])
def test_both_allocators_serve_the_same_requests(block):
    """Same arrivals, and with room enough the same completions: tier 0 changes ids and nothing else."""
    finished = []
    for extent in (0, 16):
        world = World(4000, max_requests=6, max_context=200, verify_block=block, extent_tokens=extent, seed=3)
        schedules.run(world, 120, lambda _: None)
        finished.append((world.count, [(r.rid, list(r.output_ids)) for r in world.running]))
    assert finished[0] == finished[1]


def broken_drop(self, row):
    self._reserved_tokens -= self._end[row] - self._start[row]
    self._start[row] = self._end[row] = 0


def broken_settle(self):
    self._steps = None


def broken_free(self, free_index):
    self._stage(free_index.to(torch.int64))  # a view of a row, which the next owner overwrites
    if self.free_group is not None:
        self.free_group.append(free_index)


@pytest.mark.parametrize(
    ("method", "broken"), [("_drop", broken_drop), ("_settle", broken_settle), ("free", broken_free)]
)
def test_the_invariants_catch_a_broken_allocator(method, broken, monkeypatch):
    monkeypatch.setattr(extents.ExtentAllocator, method, broken)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            world = World(200, max_requests=5, max_context=160, extent_tokens=16, seed=seed)
            schedules.run(world, 30, schedules.check)


@pytest.mark.parametrize("change", [{"seq_lens": torch.tensor([20, 20])}, {"is_encoder_decoder": True}, {}])
def test_batches_of_more_than_their_requests_rows_are_upstream_s(change):
    world = World(200, max_requests=5, max_context=160, extent_tokens=16)
    assert world.arrive(list(range(20)), 30)
    batch = world._batch(world.running, [20])
    batch.seq_lens = change.get("seq_lens", batch.seq_lens)  # a beam search has more rows than requests
    batch.model_config.is_encoder_decoder = change.get("is_encoder_decoder", False)
    assert (world.allocator.decode_slots(batch) is None) == bool(change)


@pytest.mark.parametrize("gives_up", [True, False])
def test_rows_that_upstream_writes_itself_give_their_extents_up(gives_up, monkeypatch):
    monkeypatch.setattr(extents.ExtentAllocator, "decode_slots", lambda *_: None)  # as for a beam search's rows
    if not gives_up:
        monkeypatch.setattr(extents.ExtentAllocator, "give_up", lambda *_: None)
    with nullcontext() if gives_up else pytest.raises(AssertionError):
        for seed in range(10):
            world = World(200, max_requests=5, max_context=160, extent_tokens=16, seed=seed)
            schedules.run(world, 30, schedules.check)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.integers(0, 20))
def test_runs_are_ordered_best_fit_then_longest(seed, count, need):
    g = torch.Generator().manual_seed(seed)
    slots = torch.randperm(60, generator=g)[:count].sort().values
    tally = torch.zeros(61, dtype=torch.int64)
    ordered = extents.order_runs(slots, need, tally)
    assert not tally.any()
    assert torch.equal(ordered.sort().values, slots)
    runs: list[list[int]] = []
    for slot in ordered.tolist():
        if runs and slot == runs[-1][-1] + 1:
            runs[-1].append(slot)
        else:
            runs.append([slot])
    lengths = [len(r) for r in runs]
    assert not {s + 1 for s in (r[-1] for r in runs)} & {r[0] for r in runs}, "a run was split"
    fitting = sorted(n for n in lengths if n >= need)
    assert lengths == fitting + sorted((n for n in lengths if n < need), reverse=True)


def test_a_full_pool_trims_extents_before_it_refuses():
    world = World(100, max_requests=4, max_context=120, extent_tokens=32)
    assert world.arrive(list(range(20)), 30)
    row = world.running[0].kv.req_pool_idx
    assert world.allocator.reserved(row) == (20, 64), "whole extents, with half of one to decode into"
    free = world.allocator.available_size()
    assert free == 80
    assert world.allocator.alloc(free + 1) is None
    assert len(world.allocator.alloc(free).unique()) == free
    assert world.allocator.reserved(row) == (0, 0) and world.allocator.available_size() == 0


def test_cached_tokens_are_evicted_before_extents_are_trimmed():
    world = World(200, max_requests=4, max_context=160, extent_tokens=32)
    assert world.arrive(list(range(20)), 30) and world.arrive(list(range(100, 180)), 1)
    world.step()
    row = world.running[0].kv.req_pool_idx
    assert world.tree.evictable_size() > 70 and world.allocator.reserved(row) == (21, 64)
    assert world.arrive(list(range(200, 260)), 30)
    assert world.tree.evictable_size() == 0 and world.allocator.reserved(row) == (21, 64)
    schedules.check(world)


def test_an_extent_is_given_up_if_its_row_was_cut_short():
    """As the next turn of a session does, which keeps the row."""
    world = World(100, max_requests=4, max_context=120, extent_tokens=32)
    assert world.arrive(list(range(20)), 30)
    for _ in range(3):
        world.step()
    req = world.running[0]
    world.allocator.free(world.rows.req_to_token[req.kv.req_pool_idx, 21:23])
    req.kv.kv_allocated_len = req.kv.kv_committed_len = 21
    req.output_ids = req.output_ids[:1]
    req.refresh_fill_ids()
    del req.kv_hashes[21:]
    world.running = list(world.running)
    world.step()
    assert world.allocator.reserved(req.kv.req_pool_idx)[0] == 22
    schedules.check(world)


def test_rows_that_are_handed_out_give_their_last_owners_extents_back():
    """Before anything is written to them: members of a beam search get rows without ever asking this allocator."""
    world = World(100, max_requests=4, max_context=120, extent_tokens=32)
    assert world.arrive(list(range(20)), 30)
    row = world.running[0].kv.req_pool_idx
    world.finish(world.running[0], cached=True)
    assert world.allocator.reserved(row) == (20, 64)
    assert row in world.rows.alloc_rows(4)
    world.rows.req_to_token[row] = 7
    assert world.allocator.reserved(row) == (0, 0)
    schedules.check(world)


@pytest.mark.parametrize("in_group", [False, True])
def test_what_is_freed_may_be_overwritten_by_whoever_freed_it(in_group):
    world = World(100, max_requests=4, max_context=120, extent_tokens=32)
    slots = world.allocator.alloc(10).clone()
    if in_group:
        world.allocator.free_group_begin()
    world.allocator.free(slots)
    slots.fill_(3)
    if in_group:
        world.allocator.free_group_end()
    schedules.check(world)


@pytest.mark.parametrize("take_back", [lambda a: a.trim(), lambda a: a.keep_extents_at({})], ids=["trim", "keep"])
def test_a_verify_step_that_needs_nothing_leaves_no_extent_that_is_not_there(take_back):
    """Under overlap a request's second step asks for what its first one has got: the host has seen nothing since."""
    world = World(200, max_requests=4, max_context=160, verify_block=5, extent_tokens=16)
    assert world.arrive(list(range(20)), 100)
    world.step()
    (req,) = world.running
    before = world.rows.req_to_token[req.kv.req_pool_idx, : req.kv.kv_allocated_len].clone()
    take_back(world.allocator)
    for tokens in (0, 3):
        end = req.kv.kv_allocated_len + tokens
        assert world.allocator.reserve_verify_batch(world.tree, world.running, [end])
        req.kv.kv_allocated_len = end
    assert torch.equal(world.rows.req_to_token[req.kv.req_pool_idx, : len(before)], before)
    schedules.check(world)


def test_other_pools_are_left_alone_and_the_log_says_so(caplog):
    world = World(256, page_size=64, extent_tokens=16)
    assert not isinstance(world.allocator, extents.ExtentAllocator)
    assert "SGLANG_SM120_KV_EXTENT=16 has no effect: this server keeps" in caplog.text and "page size 64" in caplog.text


def test_streaming_sessions_keep_upstreams_allocator(caplog, monkeypatch):
    monkeypatch.setattr(extents, "get_serving", lambda: SimpleNamespace(enable_streaming_session=True))
    assert not isinstance(World(256, max_requests=4, extent_tokens=16).allocator, extents.ExtentAllocator)
    assert "has no effect" in caplog.text and "--enable-streaming-session" in caplog.text


def test_a_drafters_pool_shares_its_targets_allocator_without_a_word(caplog):
    world = World(256, max_requests=4, extent_tokens=16)
    assert extents.replace_allocator(world.allocator, world.rows, 16) is world.allocator
    assert "has no effect" not in caplog.text


def serve_without_values() -> None:
    """Prefill, decode, free, merge and trim on tensors that have shapes but no values: reading one back raises."""
    with FakeTensorMode():
        rows = ReqToTokenPool(8, 512, "cpu", False)
        stock = SimpleNamespace(size=600, dtype=torch.bfloat16, device="cpu", get_kvcache=lambda: None)
        allocator = extents.ExtentAllocator(stock, rows, 16)
        reqs = [SimpleNamespace(kv=SimpleNamespace(req_pool_idx=i, kv_allocated_len=0)) for i in (6, 7, 8)]
        for _ in range(4):
            batch = SimpleNamespace(
                reqs=list(reqs), prefix_lens=[0, 0, 0], extend_lens=[20, 30, 40], extend_num_tokens=90,
                model_config=SimpleNamespace(is_encoder_decoder=False), seq_lens=torch.tensor([20, 30, 40]),
                req_pool_indices=torch.tensor([6, 7, 8]), tree_cache=None,
            )  # fmt: skip
            rows.free_rows(rows.alloc_rows(3))  # 6, 7, 8, which then belong to these requests
            allocator.plan_extend(batch)
            assert len(allocator.alloc(90)) == 90
            for req, length in zip(reqs, batch.extend_lens, strict=True):
                req.kv.kv_allocated_len = length
            for _ in range(40):
                assert len(allocator.decode_slots(batch)) == 3
                for req in reqs:
                    req.kv.kv_allocated_len += 1
            ahead = [req.kv.kv_allocated_len + 8 for req in reqs]
            assert allocator.reserve_verify_batch(None, reqs, ahead)
            for req, length in zip(reqs, ahead, strict=True):
                allocator.free(rows.req_to_token[req.kv.req_pool_idx, :length])
        assert allocator.available_size() == 600
        assert len(allocator.alloc(600)) == 600


def test_no_value_is_read_back_from_the_device():
    serve_without_values()


def test_reading_a_value_back_would_be_noticed(monkeypatch):
    monkeypatch.setattr(extents, "order_runs", lambda slots, *_: slots[slots.nonzero().view(-1)])
    with pytest.raises(DynamicOutputShapeException):
        serve_without_values()

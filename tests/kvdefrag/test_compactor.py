"""Compaction of upstream's own pools, rows and prefix cache: random schedules, faults, pieces left out."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.allocator import paged
from sglang_sm120.kvdefrag import compactor, planner

from tests.kvdefrag import schedules
from tools.churn import World

WINDOW = 24
SCHEDULES = int(os.environ.get("SM120_SCHEDULES", "300"))


class Fault(Exception):
    """Raised on purpose in the middle of a compaction."""


def new_world(page: int, extent: int, block: int, seed: int, device: str = "cpu") -> World:
    options = {"max_requests": 5, "max_context": 160 * schedules.scale(page), "seed": seed, "device": device}
    return World(240 if page == 1 else 40 * page, page, verify_block=block, extent_tokens=extent, **options)


def compact_and_check(world: World) -> int:
    """One pass; the KV of every request, in order, must hash as before, and every invariant hold."""
    before = schedules.kv_digests(world)
    closed = world.compact(WINDOW, 3 * WINDOW)
    assert schedules.kv_digests(world) == before, "a request's KV changed"
    schedules.check(world)
    return closed


@settings(max_examples=SCHEDULES, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    page=st.sampled_from([1, 1, 4, 64]),
    extent=st.sampled_from([0, 0, 16]),
    block=st.sampled_from([0, 5]),
)
def test_random_schedules_compacted_after_every_step(seed, page, extent, block):
    schedules.run(new_world(page, extent, block, seed), 25, compact_and_check)


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for tests (docs/CONTRIBUTING.md)")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_GPU)])
POOLS = pytest.mark.parametrize(("page", "extent"), [(1, 0), (1, 16), (64, 0)])


def test_a_pool_on_the_cpu_needs_no_gpu_on_a_machine_that_has_one(monkeypatch):
    platform = SimpleNamespace(capabilities=SimpleNamespace(supports_triton=True))
    monkeypatch.setattr(paged, "current_platform", platform)
    schedules.run(new_world(64, 0, 5, seed=0), 5, compact_and_check)


@DEVICES
@POOLS
@pytest.mark.parametrize("block", [0, 5])
def test_those_schedules_compact_retract_and_hit_the_prefix_cache(page, extent, block, device):
    closed, retracted, hits = [], 0, 0
    for seed in range(20):
        world = new_world(page, extent, block, seed, device)
        schedules.run(world, 25, lambda world: closed.append(compact_and_check(world)))
        retracted, hits = retracted + world.retractions, hits + world.cached_tokens
    assert sum(c > 0 for c in closed) > 10 and retracted > 5 and hits > 0


@POOLS
@pytest.mark.parametrize("left_out", ["_rewrite_rows", "_rewrite_tree", "_rewrite_free_list"])
def test_each_rewrite_left_out_is_caught(left_out, page, extent, monkeypatch):
    monkeypatch.setattr(compactor, left_out, lambda *_: lambda: None)
    with pytest.raises((AssertionError, RuntimeError)):
        for seed in range(20):
            schedules.run(new_world(page, extent, 0, seed), 25, compact_and_check)


@POOLS
@pytest.mark.parametrize("forgotten", [0, 1])
def test_a_pool_left_out_is_caught(forgotten, page, extent, monkeypatch):
    stages = compactor._move_stages
    monkeypatch.setattr(
        compactor,
        "_move_stages",
        lambda moves, pools: stages(moves, [p for i, p in enumerate(pools) if i != forgotten]),
    )
    with pytest.raises(AssertionError, match="KV"):
        for seed in range(20):
            schedules.run(new_world(page, extent, 0, seed), 25, compact_and_check)


def state(world: World) -> list:
    """Everything a compaction writes to, and who owns what."""
    tree = world.tree.all_values_flatten().tolist()
    free = world.allocator.get_all_free_pages().tolist()
    return [world.rows.req_to_token.tolist(), tree, sorted(free), *(b.tolist() for _, b in world.buffers())]


def fragmented(page: int, extent: int, block: int, device: str) -> World:
    """A world in which a pass moves everything that there is to move; made anew it is the same one."""
    for seed in range(100):
        for attempt in ("probe", "return"):
            world = new_world(page, extent, block, seed, device)
            schedules.run(world, 25, lambda _: None)
            if attempt == "return":
                return world
            world.survey()
            before = state(world)
            world.compact(WINDOW, 3 * WINDOW)
            if any(a == b for a, b in zip(before, state(world), strict=True)):
                break
    raise AssertionError("no schedule fragments this pool")


@DEVICES
@pytest.mark.parametrize("block", [0, 5])
@pytest.mark.parametrize(("page", "extent"), [(1, 0), (1, 3), (4, 0), (64, 0)])
def test_a_fault_at_any_stage_rolls_back(page, extent, block, device):
    stages: list[str] = []
    assert fragmented(page, extent, block, device).compact(WINDOW, 3 * WINDOW, stages.append)
    assert stages[-4:] == ["rows", "tree", "free list", "done"] and any(s.startswith("pool 1") for s in stages)
    for stage in stages:
        world = fragmented(page, extent, block, device)
        world.survey()  # takes back extents without an owner, as any pass does
        before = state(world)

        def fail(name: str, at: str = stage) -> None:
            if name == at:
                raise Fault(at)

        with pytest.raises(Fault):
            world.compact(WINDOW, 3 * WINDOW, fail)
        assert state(world) == before
        schedules.check(world)
        schedules.run(world, 5, compact_and_check)


@DEVICES
@POOLS
def test_chunks_that_touch_each_other_are_carried_out_and_undone_in_order(page, extent, device):
    """A random permutation of a whole pool: long cycles, cut into lists that a second chunk joins."""
    world = new_world(page, extent, 0, 1, device)
    schedules.run(world, 25, lambda _: None)
    survey = world.survey()
    units = len(survey.owner) - 1
    order = torch.randperm(units, generator=torch.Generator().manual_seed(0)).to(device)
    new_unit = torch.cat([order.new_zeros(1), 1 + order])
    moves = planner.Plan(planner.in_lists(new_unit, WINDOW), new_unit, 0, 0, 0)
    assert len(moves.chunks) == 2
    pools = [compactor.Pool(pool.kv_buffer, page) for pool in world.pools]
    before, kv = state(world), schedules.kv_digests(world)

    def fail(stage: str) -> None:
        if stage == "done":
            raise Fault(stage)

    with pytest.raises(Fault):
        compactor.commit(survey, moves, pools, fail)
    assert state(world) == before
    compactor.commit(survey, moves, pools)
    assert state(world) != before and schedules.kv_digests(world) == kv
    schedules.check(world)


@POOLS
def test_the_plan_says_how_much_it_moves_and_gains(page, extent):
    gathered = 0
    for seed in range(10):
        world = new_world(page, extent, 0, seed)
        schedules.run(world, 25, lambda _: None)
        moves = planner.plan(world.survey(), WINDOW, 3 * WINDOW)
        if moves:
            gathered += moves.pieces
            stays = moves.new_unit == torch.arange(len(moves.new_unit))
            assert moves.units_moved == (~stays).sum() <= 3 * WINDOW
            before = gaps(world)
            compactor.commit(world.survey(), moves, [])
            assert abs(before - gaps(world) - moves.gaps_closed) <= 2 * 3, "but for the ends of 3 windows"
    assert gathered or page > 1


def gaps(world: World) -> int:
    """Neighbours in the pool that do not follow each other in a row or a node, but for two free ones."""
    survey = world.survey()
    key = (survey.owner * (len(survey.owner) + 1) + survey.position).tolist()
    free = (survey.owner == len(survey.lengths)).tolist()
    return sum(key[i + 1] != key[i] + 1 and not (free[i] and free[i + 1]) for i in range(1, len(key) - 1))


def test_a_unit_has_the_bytes_of_a_page_in_all_layers():
    layers = [torch.zeros(3 * 64 + 64, 1, 6, dtype=torch.bfloat16), torch.zeros(3 * 64 + 64, 2, 4)]
    assert compactor.Pool(layers, 64).unit_bytes == 64 * (6 * 2 + 2 * 4 * 4)


def test_the_plan_depends_on_ids_only():
    """Two ranks with the same tables but other KV make the same plan."""
    plans = []
    for kv in (0.0, 1.0):
        world = new_world(1, 0, 0, 5)
        schedules.run(world, 25, lambda _: None)
        for _, buffer in world.buffers():
            buffer.fill_(kv)
        plans.append(planner.plan(world.survey(), WINDOW, 3 * WINDOW))
    assert len(plans[0].chunks) == len(plans[1].chunks) > 0 and torch.equal(plans[0].new_unit, plans[1].new_unit)


def test_an_unknown_holder_stops_it():
    world = new_world(1, 0, 0, 5)
    schedules.run(world, 25, lambda _: None)
    world.running = world.running[1:]
    with pytest.raises(RuntimeError, match="not accounted for"):
        world.compact(WINDOW, WINDOW)


@pytest.mark.parametrize(("page", "size"), [(1, 2000), (4, 8000)])
def test_passes_converge_to_long_runs(page, size):
    """Eight requests decoded side by side lie scattered; a few passes bring most of the contiguity back, then stop."""
    world = World(size, page, max_requests=8, max_context=1000, seed=1)
    for i in range(8):
        assert world.arrive([i] * (5 * page + 1), 10_000)
    for _ in range(100 * page):
        world.step()
    before = world.survey().holders.census(64).total
    passes = 0
    while world.compact(256, 512):
        passes += 1
        schedules.check(world)
        assert passes < 20
    after = world.survey().holders.census(64).total
    assert before.units == after.units and after.mean_length > 10 * before.mean_length
    assert after.contiguity > 0.9

"""When compaction runs, what it waits for, and what a failure leaves: against a stand-in for the scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang_sm120.kvdefrag import compactor, planner, serving
from sglang_sm120.kvdefrag.settings import Settings, When

from tests.kvdefrag import schedules
from tools.churn import World


def scattered() -> World:
    """Six requests decoded side by side: every slot of a request is apart from the next."""
    world = World(3_000, max_requests=6, max_context=1_000)
    for i in range(6):
        assert world.arrive([i] * 3, 10_000)
    for _ in range(200):
        world.step()
    return world


def defragmenter(world: World, when: When, **options) -> serving.Defragmenter:
    served = world.scheduler(world.pools[1:])
    return serving.Defragmenter(served, Settings(compact=when, compact_ms=1000, **options))


def test_the_drafters_pool_is_moved_with_the_targets():
    world = scattered()
    assert serving.kv_pools(world.scheduler(world.pools[1:])) == world.pools and len(world.pools) > 1
    plain = world.scheduler()
    plain.draft_worker = None
    assert serving.kv_pools(plain) == world.pools[:1]


def test_auto_looks_now_and_then_and_compacts_below_the_threshold(monkeypatch):
    world = scattered()
    auto = defragmenter(world, When.AUTO)
    assert looks(auto, serving.STEPS_BETWEEN_PASSES) == [False] * serving.STEPS_BETWEEN_PASSES and auto.due()
    before = schedules.kv_digests(world)
    counted: list[float] = []
    monkeypatch.setattr(serving.Pace, "steps_for", lambda _, seconds: counted.append(seconds) or 1)
    assert auto.run_pass()
    assert counted[0] > 1, "the second that the GPU may go on moving"
    monkeypatch.undo()
    assert schedules.kv_digests(world) == before
    schedules.check(world)
    assert auto.report()["contiguity"] > 0.9 and auto.report()["passes"] == 1
    looked: list[float] = []
    monkeypatch.setattr(auto, "_contiguity", lambda: looked.append(1.0) or 1.0)
    assert not any(looks(auto, 10 * serving.STEPS_BETWEEN_PASSES)), "it is above the threshold now"
    assert 9 <= len(looked) <= 10, "a look costs something"


def looks(tier_1: serving.Defragmenter, steps: int) -> list[bool]:
    """Before each of so many steps: whether a pass is due."""
    due = []
    for _ in range(steps):
        due.append(tier_1.due())
        tier_1.count_step()
    return due


def test_the_mean_step_grows_by_less_than_5_percent_however_long_a_pass_takes(monkeypatch):
    now = 0.0
    monkeypatch.setattr(serving.time, "perf_counter", lambda: now)
    for step_s, pass_s in ((0.0025, 0.007), (0.0025, 0.1), (0.03, 0.007)):
        pace = serving.Pace()
        for _ in range(2 * serving.STEPS_BETWEEN_PASSES):
            now += step_s
            pace.step()
        steps = pace.steps_for(pass_s)
        assert steps >= serving.STEPS_BETWEEN_PASSES > 100, "less than a step in a hundred"
        assert (pass_s + step_s) / (steps * step_s) < 0.05
        pace.wait(steps)
        for _ in range(steps):
            assert not pace.allows_a_look()
            pace.step()
        assert pace.allows_a_look()


def test_idle_time_is_no_part_of_a_step(monkeypatch):
    now = 0.0
    monkeypatch.setattr(serving.time, "perf_counter", lambda: now)
    pace = serving.Pace()
    for idle_s in (0.0, 100.0):
        for _ in range(50):
            now += 0.01
            pace.step()
        pace.pause()
        now += idle_s
    assert pace.steps_for(1.0) == pytest.approx(101 / serving.PASS_SHARE, abs=1)


class Ranks:
    """This rank and one more: what that one answers, or has planned with."""

    def __init__(self, monkeypatch, answers: tuple[int, int], budget_units: int) -> None:
        self._answers, self._budget_units = torch.tensor(answers), torch.tensor([budget_units])
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)

    def _all_reduce(self, values, op, group):
        assert group == "ranks"
        if op is torch.distributed.ReduceOp.MAX:
            torch.maximum(values, self._answers, out=values)
        else:
            assert op is torch.distributed.ReduceOp.MIN
            torch.minimum(values, self._budget_units, out=values)

    def defragmenter(self, world: World) -> serving.Defragmenter:
        served = world.scheduler(world.pools[1:], tp_size=2)
        served.tp_cpu_group = "ranks"
        return serving.Defragmenter(served, Settings(compact=When.AUTO, compact_ms=1000))


@pytest.mark.parametrize(("theirs", "refused"), [((900, 0), None), ((1, 1), "a pass failed on another rank")])
def test_ranks_wait_as_long_as_the_slowest_and_stop_together(theirs, refused, monkeypatch):
    world = scattered()
    tier_1 = Ranks(monkeypatch, theirs, 1 << 40).defragmenter(world)
    assert tier_1.run_pass() == (refused is None) and tier_1.report()["refused_because"] == refused
    assert not any(looks(tier_1, 899))
    schedules.check(world)


def test_ranks_plan_with_the_budget_of_the_slowest_gpu(monkeypatch):
    planned: list[int] = []
    monkeypatch.setattr(planner, "plan", lambda _survey, _window, budget, *_: planned.append(budget))
    Ranks(monkeypatch, (0, 0), 77).defragmenter(scattered()).run_pass()
    assert planned == [77]


def test_idle_compacts_to_the_end_and_then_rests(monkeypatch):
    world = scattered()
    idle = defragmenter(world, When.IDLE)
    assert not idle.due(), "idle mode leaves a serving scheduler alone"
    for _ in range(20):
        idle.when_idle()
    passes = idle.report()["passes"]
    assert passes >= 1 and planner.plan(world.survey(), serving.WINDOW_UNITS, 1 << 20) is None
    surveys = []
    monkeypatch.setattr(compactor.Survey, "take", surveys.append)
    for _ in range(3):  # as the event loop does while there is no batch
        assert not idle.due()
        idle.when_idle()
    assert not surveys, "an idle server has nothing left to look for"
    monkeypatch.undo()
    for _ in range(200):
        world.step()
    idle.count_step()
    idle.when_idle()
    assert idle.report()["passes"] > passes, "what was served since has scattered again"


def test_a_look_in_vain_leaves_a_picture_of_the_pool_until_a_pass_has_moved_something():
    world = World(3_000, max_requests=6, max_context=1_000)
    idle = defragmenter(world, When.IDLE)
    for i in range(2):
        idle.count_step()
        idle.when_idle()
        report = idle.report()
        assert report["map_before"] == report["map_after"] == world.owners() and not report["passes"]
        assert world.arrive([i] * 300, 10_000)
    for i in range(2, 6):
        assert world.arrive([i] * 3, 10_000)
    for _ in range(200):
        world.step()
    while idle.run_pass():
        pass
    report = idle.report()
    assert report["passes"] and report["map_before"] != report["map_after"] == world.owners()


def test_asking_compacts_at_the_next_step_until_nothing_gains():
    asked = defragmenter(scattered(), When.IDLE)
    assert asked.ask(True) and asked.due()
    while asked.run_pass():
        assert asked.due()
    assert not asked.due()


@pytest.mark.parametrize("asked", [True, False])
def test_a_look_in_vain_is_repeated_late_unless_it_was_asked_for(asked):
    world = scattered()
    auto = defragmenter(world, When.AUTO, compact_below=1.0)
    while auto.run_pass():
        pass
    if asked:
        auto.ask(True)
        assert auto.due() and not auto.run_pass()
    vain = serving.STEPS_BETWEEN_PASSES if asked else 8 * serving.STEPS_BETWEEN_PASSES
    assert not any(looks(auto, vain)) and auto.due()


@pytest.mark.parametrize("when", [When.IDLE, When.AUTO, When.EVERY_STEP])
def test_asking_to_stop_stops_every_mode_until_asked_to_start(when):
    stopped = defragmenter(scattered(), when)
    assert stopped.ask(False)
    assert not any(looks(stopped, 2 * serving.STEPS_BETWEEN_PASSES))
    stopped.when_idle()
    assert stopped.report()["passes"] == 0
    assert stopped.ask(True) and stopped.due()
    stopped.when_idle()
    assert stopped.report()["passes"] == 1


def test_the_queued_result_is_processed_before_and_forgotten_after():
    world = scattered()
    served = world.scheduler(world.pools[1:])
    order = []
    served.result_queue.append(("batch", "result"))
    served.process_batch_result = lambda *result: order.append(result)
    hooks = serving.Hooks(Settings(compact=When.EVERY_STEP, compact_ms=1000))

    def next_batch(_scheduler, running_batch, last_batch):
        order.append((running_batch, last_batch))
        assert served.last_batch == "last", "upstream's own step still sees the last batch"
        return plan

    plan = SimpleNamespace(batch_to_run="batch")
    assert hooks.before_next_batch(next_batch, served, running_batch="running", last_batch="last") is plan
    assert order == [("batch", "result"), ("running", "last")]
    assert served.last_batch is None and not served.result_queue


def test_a_failing_pass_changes_nothing_and_turns_compaction_off(monkeypatch):
    world = scattered()
    failing = defragmenter(world, When.EVERY_STEP)
    rows = world.rows.req_to_token.clone()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(compactor, "_rewrite_tree", fail)
    assert not failing.run_pass()
    assert (world.rows.req_to_token == rows).all()
    schedules.check(world)
    assert failing.report()["refused_because"] == "a pass failed and was undone: out of memory"
    assert not failing.due() and not failing.ask(True)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("streaming session", lambda s: setattr(s.tree_cache, "session_records", lambda: {"id": None})),
        ("collected", lambda s: s.token_to_kv_pool_allocator.free_group_begin()),
        ("beam", lambda s: setattr(s.invariant_checker._requests_owning_rows()[0], "beam_group", object())),
        ("belong to known requests", lambda s: s.req_to_token_pool.free_slots.pop() if s.req_to_token_pool.free_slots
         else s.invariant_checker._requests_owning_rows().pop()),
    ],
)  # fmt: skip
def test_it_waits_while_ids_are_held_elsewhere(what, change, caplog):
    waiting = defragmenter(scattered(), When.AUTO)
    looks(waiting, serving.STEPS_BETWEEN_PASSES)
    change(waiting._scheduler)
    with caplog.at_level("INFO"):
        assert not waiting.run_pass()
    assert what in caplog.text and waiting.report()["refused_because"] is None
    assert not any(looks(waiting, serving.STEPS_BETWEEN_PASSES)), "nor does it look at every step until then"


def test_while_it_waits_no_step_loses_its_overlap_and_the_log_says_why_once(caplog):
    world = scattered()
    asked = defragmenter(world, When.IDLE)
    world.tree.session_records = lambda: {"id": None}
    assert asked.ask(True)
    with caplog.at_level("INFO"):
        assert not any(looks(asked, 10))
    assert caplog.text.count("a streaming session holds KV rows") == 1
    del world.tree.session_records
    assert asked.due() and asked.run_pass()

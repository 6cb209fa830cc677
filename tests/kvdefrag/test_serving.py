"""When compaction runs, what it waits for, and what a failure leaves: against a stand-in for the scheduler."""

from __future__ import annotations

import pytest
from sglang_sm120.kvdefrag import compactor, serving
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


def test_auto_looks_now_and_then_and_compacts_below_the_threshold():
    world = scattered()
    auto = defragmenter(world, When.AUTO)
    steps = [auto.due() for _ in range(serving.STEPS_BETWEEN_PASSES)]
    assert steps == [False] * (serving.STEPS_BETWEEN_PASSES - 1) + [True]
    before = schedules.kv_digests(world)
    assert auto.run_pass()
    assert schedules.kv_digests(world) == before
    schedules.check(world)
    assert auto.report()["contiguity"] > 0.9 and auto.report()["passes"] == 1
    assert not any(auto.due() for _ in range(serving.STEPS_BETWEEN_PASSES)), "it is above the threshold now"


def test_idle_compacts_to_the_end_and_then_rests():
    world = scattered()
    idle = defragmenter(world, When.IDLE)
    assert not idle.due(), "idle mode leaves a serving scheduler alone"
    for _ in range(20):
        idle.when_idle()
    passes = idle.report()["passes"]
    assert passes >= 1 and compactor.plan(world.survey(), serving.WINDOW_UNITS, 1 << 20) is None
    idle.when_idle()
    assert idle.report()["passes"] == passes


def test_asking_compacts_at_the_next_step_until_nothing_gains():
    asked = defragmenter(scattered(), When.IDLE)
    assert asked.ask(True) and asked.due()
    while asked.run_pass():
        assert asked.due()
    assert not asked.due()


@pytest.mark.parametrize("when", [When.IDLE, When.AUTO, When.EVERY_STEP])
def test_asking_to_stop_stops_every_mode_until_asked_to_start(when):
    stopped = defragmenter(scattered(), when)
    assert stopped.ask(False)
    assert not any(stopped.due() for _ in range(2 * serving.STEPS_BETWEEN_PASSES))
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
        return "plan"

    assert hooks.before_next_batch(next_batch, served, running_batch="running", last_batch="last") == "plan"
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
    waiting = defragmenter(scattered(), When.EVERY_STEP)
    change(waiting._scheduler)
    with caplog.at_level("INFO"):
        assert not waiting.run_pass()
    assert what in caplog.text and waiting.report()["refused_because"] is None

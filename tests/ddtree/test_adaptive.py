"""The adaptive width in a closed loop with a made-up host and device, and how steps reach it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")
from sglang_sm120.ddtree import adaptive as module

WIDTHS = [1, 8, 17, 33]


@dataclass
class Machine:
    """Host and device of a server with overlap scheduling: milliseconds.

    verify: device time of a target pass by width; draft: of the drafter. launch: what the host needs from choosing a
    width to the draft and to the verify (plain, drafting); process: from the end of the step before to the next choice.
    slow: what the device's times are multiplied by at a step. wrong: what those measured at start were, by width.
    accepts: the chance of the chain's next node; tail: of any node past the chain.
    """

    verify: dict[int, float]
    accepts: float
    draft: float = 0.6
    launch: tuple[float, float] = (0.4, 1.0)
    process: float = 0.5
    tail: float = 0.02
    slow: Callable[[int], float] = lambda _: 1.0
    slow_host: Callable[[int], float] = lambda _: 1.0
    wrong: dict[int, float] = field(default_factory=dict)
    noise: float = 0.03

    def __post_init__(self) -> None:
        self.now = self.end = 0.0
        self.rng = np.random.default_rng(0)
        self.log: list[tuple[int, float]] = []
        device = {w: v + self.draft * (w > 1) for w, v in self.verify.items()}
        measured = {w: {1: (self.wrong.get(w, 1.0) * 1e-3 * seconds, 0.0)} for w, seconds in device.items()}
        state = self.state = object.__new__(module.AdaptiveWidth)
        state.policy = module.WidthPolicy(list(self.verify), module.StepCosts(measured))
        state.worker = types.SimpleNamespace(device="cpu")
        state._pending, state._timed, state._before, state._use = module.deque(), [], None, lambda _: None
        chain = [1.0] + [self.accepts**i for i in range(1, 8)]
        self.chances = np.array(chain + [self.tail] * (max(self.verify) - 8))

    def step(self, at: int, width: int | None = None) -> None:
        begun = self.now
        chosen = self.state.choose(types.SimpleNamespace(seq_lens_cpu=torch.tensor([1000]))) if width is None else width
        slow = self.slow(at) * self.rng.lognormal(0.0, self.noise)
        host = self.slow_host(at)
        ready = self.end
        if chosen > 1:
            ready = max(ready, begun + self.launch[0] * host) + self.draft * slow
        before, self.end = self.end, max(ready, begun + self.launch[chosen > 1] * host) + self.verify[chosen] * slow
        if width is None:
            self.state.record(*self.outcome(chosen), chosen)
        self.now = max(begun + self.launch[chosen > 1] * host, before) + self.process * host
        self.log.append((chosen, self.end))

    def outcome(self, width: int) -> tuple[types.SimpleNamespace, types.SimpleNamespace]:
        nodes = torch.zeros(1, 8, dtype=torch.int64)
        for i in range(1, 8):
            if i >= width or self.rng.random() >= self.accepts:
                break
            nodes[0, i] = i
        masses = torch.from_numpy(np.log(self.chances))[None]
        return types.SimpleNamespace(nodes=nodes), types.SimpleNamespace(masses=masses)

    def tokens(self, width: int) -> float:
        return 1.0 + self.chances[1 : min(width, 8)].sum()

    def speed(self, first: int, last: int) -> float:
        """Tokens per millisecond over these steps."""
        tokens = sum(self.tokens(width) for width, _ in self.log[first:last])
        return tokens / (self.log[last - 1][1] - self.log[first - 1][1])


@pytest.fixture
def against_the_best(monkeypatch):
    """`run(steps, first, **machine)`: the adaptive width's speed from the step `first` on over the best fixed one's."""
    monkeypatch.setattr(
        module, "get_parallel", lambda: types.SimpleNamespace(tp_group=types.SimpleNamespace(world_size=1))
    )

    def run(steps: int, first: int, **what) -> float:
        fixed = []
        for width in what["verify"]:
            machine = Machine(**what | {"slow": lambda _: 1.0})
            for at in range(500):
                machine.step(at, width)
            fixed.append(machine.speed(100, 500))
        machine = Machine(**what)
        monkeypatch.setattr(module._Mark, "now", lambda _device: module._Mark(None, 1e-3 * machine.end))
        for at in range(steps):
            machine.step(at)
        return machine.speed(first, steps) / max(fixed)

    return run


# As at 1,024 tokens on an H200, at 32,768, where verifying is dear, and of a small model, where the host is slow.
LIGHT = {1: 2.8, 8: 3.3, 17: 3.9, 33: 4.6}
HEAVY = {1: 4.5, 8: 10.0, 17: 15.0, 33: 22.0}
TINY = {1: 0.6, 8: 0.7, 17: 0.8, 33: 1.0}


@pytest.mark.parametrize("accepts", [0.02, 0.15, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("verify", [LIGHT, HEAVY, TINY], ids=["light", "heavy", "tiny"])
def test_close_to_the_best_fixed_width(against_the_best, verify, accepts):
    assert against_the_best(3000, 500, verify=verify, accepts=accepts) > 0.97


@pytest.mark.parametrize("factor", [0.2, 5.0])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("accepts", [0.1, 0.7], ids=["poor", "good"])
def test_a_wrong_figure_of_one_width_at_start_is_put_right(against_the_best, width, factor, accepts):
    for verify in (LIGHT, HEAVY):
        assert against_the_best(2500, 500, verify=verify, accepts=accepts, wrong={width: factor}) > 0.97


@pytest.mark.parametrize("wrong", [{8: 0.4, 17: 0.4, 33: 0.4}, {8: 3.0, 17: 3.0, 33: 3.0}])
@pytest.mark.parametrize("busy", [(0, 200), (150, 900), (150, 230)])
@pytest.mark.parametrize("accepts", [0.1, 0.7], ids=["poor", "good"])
def test_a_busy_moment_rules_out_nothing(against_the_best, accepts, busy, wrong):
    """Three times as slow between the `busy` steps, as another user of the device makes it."""
    slow = lambda at: 3.0 if busy[0] <= at < busy[1] else 1.0  # noqa: E731
    assert against_the_best(4000, 1500, verify=LIGHT, accepts=accepts, wrong=wrong, slow=slow) > 0.97


@pytest.mark.parametrize("accepts", [0.05, 0.3, 0.7])
@pytest.mark.parametrize(
    "what",
    [
        {"verify": TINY, "process": 2.0, "launch": (0.8, 1.6)},  # the device waits for the host from step to step
        {"verify": {1: 2.2, 8: 2.9, 17: 3.2, 33: 3.9}, "process": 1.0, "launch": (0.6, 3.0)},  # inside a step
        {"verify": {1: 0.8, 8: 1.0, 17: 2.2, 33: 4.4}, "process": 2.0},  # only for narrow ones
    ],
    ids=["between steps", "inside a step", "narrow"],
)
def test_whoever_sets_the_pace(against_the_best, what, accepts):
    assert against_the_best(3000, 500, accepts=accepts, **what) > 0.97


def test_a_host_whose_pace_changes(against_the_best):
    host = lambda at: 1.0 if at // 100 % 2 else 1.7  # noqa: E731
    what = {"verify": TINY | {33: 20.0}, "process": 2.0, "accepts": 0.3}
    assert against_the_best(4000, 500, slow_host=host, **what) > 0.97


def test_drafts_that_get_good_are_found_out(against_the_best, monkeypatch):
    machine = Machine(verify=LIGHT, accepts=0.02)
    monkeypatch.setattr(module._Mark, "now", lambda _device: module._Mark(None, 1e-3 * machine.end))
    for at in range(2000):
        machine.step(at)
    assert np.mean([width == 1 for width, _ in machine.log[1000:]]) > 0.95
    machine.accepts, machine.chances = 0.8, Machine(verify=LIGHT, accepts=0.8).chances
    for at in range(1000):
        machine.step(at)
    assert np.mean([width > 1 for width, _ in machine.log[2500:]]) > 0.9


def state_of(policy) -> module.AdaptiveWidth:
    """What `choose` and `record` need."""
    state = object.__new__(module.AdaptiveWidth)
    state.policy, state.worker, state._use = policy, types.SimpleNamespace(device="cpu"), lambda _: None
    state._pending, state._timed, state._before = module.deque(), [], None
    return state


@pytest.fixture
def heard(monkeypatch):
    """`steps(*widths)`: run steps of these widths, 10 ms each, or None for a prompt; what the policy was told."""
    told: list[tuple] = []
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    group = types.SimpleNamespace(world_size=1, broadcast_object=lambda timed, src: [(8, 7, 7, 7.0)] * len(timed))
    monkeypatch.setattr(module, "get_parallel", lambda: types.SimpleNamespace(tp_group=group))
    coming: list[int] = []
    state = state_of(
        types.SimpleNamespace(
            choose=lambda *_: coming[0],
            learn=lambda *timed: told.append(("time", *timed)),
            observe=lambda width, *_: told.append(("nodes", width)),
            pass_over=lambda size: told.append(("passed", size)),
        )
    )
    batch = types.SimpleNamespace(seq_lens_cpu=torch.tensor([5, 6]))
    path = types.SimpleNamespace(nodes=torch.zeros(2, 3, dtype=torch.int64))

    def steps(*widths: int | None) -> list[tuple]:
        told.clear()
        for width in widths:
            now[0] += 0.01
            if width is None:
                state.interrupt()
                continue
            coming[:] = [width]
            state.choose(batch)
            state.record(path, types.SimpleNamespace(masses=torch.zeros(2, 4)), width)
        return told

    return steps, group


def test_a_step_is_timed_after_another_of_its_width(heard):
    steps, _ = heard
    told = steps(1, 1, 8, 8, None, 8, 8, 1, 1, 1, 1, 1)
    times = [what[1:] for what in told if what[0] == "time"]
    assert [width for width, *_ in times] == [1, 8, 8, 1], "the last are not over yet"
    assert all(tuple(what) == (2, 11, pytest.approx(0.01)) for _, *what in times)


def test_a_probe_is_heard_of_though_no_draft_follows(heard):
    steps, _ = heard
    assert ("nodes", 8) not in steps(8, 1, 1)
    assert ("nodes", 8) in steps(1)


def test_all_ranks_hear_the_times_of_the_first(heard):
    steps, group = heard
    group.world_size = 2
    told = [what for what in steps(*[8] * (module.TOLD_STEPS + 1 + module.LAG_STEPS)) if what[0] == "time"]
    assert told == []
    assert [what for what in steps(8) if what[0] == "time"] == [("time", 8, 7, 7, 7.0)] * module.TOLD_STEPS


def test_an_outcome_says_which_nodes_were_accepted():
    nodes, masses = torch.tensor([[0, 2, 0], [0, 0, 0]]), torch.tensor([[0.0, -1.0, -2.0, -3.0]] * 2)
    probabilities, accepted = module.outcome(nodes, masses)
    assert probabilities[0].tolist() == pytest.approx([1.0, 0.3679, 0.1353, 0.0498], abs=1e-4)
    assert accepted.tolist() == [[True, False, True, False], [True, False, False, False]]


@pytest.mark.parametrize(("pool", "sizes"), [(100_000, [1, 4, 16, 48]), (16_384, [1, 4, 16, 31]), (1030, [1, 2])])
def test_what_is_measured_at_start_fits_the_pool(pool, sizes, monkeypatch):
    state = object.__new__(module.AdaptiveWidth)
    tables = types.SimpleNamespace(req_to_token=torch.zeros(2, 2))
    state.runner = types.SimpleNamespace(
        max_running_requests=48, token_to_kv_pool=types.SimpleNamespace(size=pool), req_to_token_pool=tables,
        model_config=types.SimpleNamespace(context_len=32_768),
    )  # fmt: skip
    state.worker = types.SimpleNamespace(widest=513, draft_model_runner=state.runner)
    state._context_tokens, state._use = module.CONTEXT_TOKENS["cuda"], lambda _: None
    monkeypatch.setattr(
        module, "get_parallel", lambda: types.SimpleNamespace(tp_group=types.SimpleNamespace(world_size=1))
    )
    measured: list[int] = []

    def seconds(width: int, batch_size: int, context_tokens: int) -> float:
        measured.append(batch_size)
        assert batch_size * (context_tokens + width) <= pool
        return 1.0

    monkeypatch.setattr(state, "_seconds", seconds)
    state._measure([1, 8, 513])
    assert sorted(set(measured)) == sizes


def test_a_context_token_costs_what_it_costs_in_any_batch(monkeypatch):
    """Contexts are measured a request and counted over the batch: the line must give back both measurements."""
    state = object.__new__(module.AdaptiveWidth)
    pool = types.SimpleNamespace(size=100_000)
    state.runner = types.SimpleNamespace(token_to_kv_pool=pool, model_config=types.SimpleNamespace(context_len=4096))
    state.worker, state._context_tokens = types.SimpleNamespace(widest=33), module.CONTEXT_TOKENS["cuda"]
    seconds = {width: lambda batch, tokens, w=width: 1.0 + 0.1 * w + 1e-4 * w * batch * tokens for width in WIDTHS}
    monkeypatch.setattr(state, "_fastest", lambda widths, *load: {width: seconds[width](*load) for width in widths})
    for batch in (1, 16):
        lines = state._lines(WIDTHS, batch)
        for width in WIDTHS:
            assert lines[width] == (pytest.approx(1.0 + 0.1 * width), pytest.approx(1e-4 * width))


def test_a_step_without_speculation_is_timed_without_a_draft(monkeypatch):
    """On a CPU, where a step runs once to warm up and once to be timed."""
    state = object.__new__(module.AdaptiveWidth)
    state.runner, state._use, ran = "target", lambda _: None, []
    state.worker = types.SimpleNamespace(device="cpu", block_size=8, draft_model_runner="drafter")
    monkeypatch.setattr(state, "_dummy_forward", lambda *what: ran.append(what))
    state._seconds(1, 4, 100)
    assert ran == [("target", 1, 4, 100)] * 2
    ran.clear()
    state._seconds(17, 4, 100)
    assert ran == [("drafter", 8, 4, 100), ("target", 17, 4, 100)] * 2

"""What surrounds the captured tail of the target's graph, and how steps reach the width policy, without a GPU."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch
from sglang_sm120.ddtree import tree as T
from sglang_sm120.ddtree.settle import CapturedSettler


class Worker:
    """Stands for the worker: settles by the walk alone."""

    def __init__(self) -> None:
        self.device, self.calls = "cpu", []
        self.model_runner = types.SimpleNamespace(capture_tail_hooks=[])

    def settle(self, tokens, choices, slots, prefix_lens, hidden, is_live) -> T.Path:
        self.calls.append((tokens, choices, hidden, is_live))
        parents = torch.full(tokens.shape, -1)
        return T.walk(tokens, parents, choices, slots, prefix_lens, tokens.shape[1] - 1)


@pytest.fixture
def captured() -> tuple[Worker, CapturedSettler]:
    """Graphs of width 3 for 2 and 4 requests; the argmax of request b's node n is 10 b + n."""
    worker = Worker()
    settler = CapturedSettler(worker)
    for batch in (4, 2):
        logits = torch.zeros(batch * 3, 64)
        logits[torch.arange(batch * 3), (10 * torch.arange(batch)[:, None] + torch.arange(3)).flatten()] = 1.0
        output = types.SimpleNamespace(next_token_logits=logits, hidden_states="hidden")
        forward_batch = types.SimpleNamespace(
            batch_size=batch,
            input_ids=torch.zeros(batch * 3, dtype=torch.int64),
            out_cache_loc=torch.arange(batch * 3),
            seq_lens=torch.full((batch,), 100),
        )
        (hook,) = worker.model_runner.capture_tail_hooks
        hook(types.SimpleNamespace(captured_req_width=3), output, forward_batch, batch * 3)
    return worker, settler


def test_the_tail_settles_the_argmax(captured):
    worker, settler = captured
    assert worker.calls[0][1].tolist()[2] == [20, 21, 22] and worker.calls[0][2] == "hidden"
    path = settler.path(3, 3)
    assert path.bonus.tolist() == [0, 10, 20] and path.ends.tolist() == [101, 101, 101]


def test_the_smallest_graph_that_holds_the_batch_is_read(captured):
    _, settler = captured
    assert settler.path(2, 3).tokens.data_ptr() != settler.path(3, 3).tokens.data_ptr()
    settler._paths[3, 4][1].fill_(63)
    assert settler.path(2, 3).bonus.tolist() == [0, 10] and settler.path(3, 3).bonus.tolist() == [63] * 3


def test_what_outlives_the_step_is_a_copy(captured):
    _, settler = captured
    before = settler.path(2, 3)
    settler._paths[3, 2][1].fill_(7)
    assert before.bonus.tolist() == [0, 10] and before.ends.tolist() == [101, 101]
    assert before.commit_lens.tolist() == [1, 1] and before.tokens[:, 0].tolist() == [0, 10]


def test_only_an_armed_tail_is_live(captured):
    worker, settler = captured
    is_live = worker.calls[0][3]
    for armed in (False, True, True, False):
        assert settler.arm(armed) is armed and is_live.tolist() == [int(armed)]


def adaptive():
    pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")
    from sglang_sm120.ddtree import adaptive

    return adaptive


def test_an_outcome_says_which_nodes_were_accepted():
    outcome = adaptive()._Outcome.send(
        3, torch.tensor([[0, 2, 0], [0, 0, 0]]), torch.tensor([[0.0, -1.0, -2.0, -3.0]] * 2)
    )
    probabilities, accepted = outcome.read()
    assert probabilities[0].tolist() == pytest.approx([1.0, 0.3679, 0.1353, 0.0498], abs=1e-4)
    assert accepted.tolist() == [[True, False, True, False], [True, False, False, False]]


def test_a_probe_is_heard_of_though_no_draft_follows(monkeypatch):
    """Steps without a draft send nothing, yet they let the results of the steps before them arrive."""
    module = adaptive()
    heard, passed = [], []
    policy = types.SimpleNamespace(
        observe=lambda width, *_: heard.append(width), pass_over=passed.append, choose=lambda *_: 1
    )
    state = types.SimpleNamespace(
        policy=policy,
        _steps=0,
        _pending=module.deque(),
        _host_is_hidden=False,
        _use=lambda _: None,
        _end=torch.cpu.Event(),
    )
    batch = types.SimpleNamespace(seq_lens_cpu=torch.tensor([5, 6]))
    path = types.SimpleNamespace(nodes=torch.zeros(2, 3, dtype=torch.int64))
    drafted = types.SimpleNamespace(masses=torch.zeros(2, 4))
    for step in range(2 + module.LAG_STEPS):
        module.AdaptiveWidth.choose(state, batch)
        assert heard == ([] if step <= module.LAG_STEPS else [9])
        module.AdaptiveWidth.record(state, path, drafted, 9 if step == 0 else 1)
    assert passed == [2] * (1 + module.LAG_STEPS)


@pytest.fixture
def pace(monkeypatch):
    """`watch(drafts, took, expected, idle)` for a step that took so long; what was learned."""
    module = adaptive()
    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        module, "get_parallel", lambda: types.SimpleNamespace(tp_group=types.SimpleNamespace(world_size=1))
    )
    costs = module.StepCosts({})
    end = types.SimpleNamespace()
    state = types.SimpleNamespace(policy=types.SimpleNamespace(costs=costs), _drafts=False, _pace=[], _end=end)

    def watch(drafts, took, expected=1.0, idle=False):
        end.query = lambda: idle
        module.AdaptiveWidth._watch_pace(state, drafts, expected)
        now[0] += took

    return watch, costs, module.LAG_STEPS + module.PACE_STEPS + 1


@pytest.mark.parametrize("idle, learned", [(True, (3.0, 1.0)), (False, (0.0, 3.0))], ids=["host", "device"])
def test_a_step_takes_as_long_as_the_slower_of_host_and_device(pace, idle, learned):
    watch, costs, steps = pace
    for step in range(steps):
        watch(True, 3.0 if step % 3 else 30.0, idle=idle)  # prompts come between
    assert costs.learned[True] == pytest.approx(learned, rel=0.02)


def test_a_step_without_a_draft_has_figures_of_its_own(pace):
    watch, costs, steps = pace
    for drafts, took in ((True, 3.0), (False, 2.0)):
        for _ in range(steps):
            watch(drafts, took, idle=True)
    assert (costs.learned[False][0], costs.learned[True][0]) == pytest.approx((2.0, 3.0), rel=0.02)


def test_steps_after_one_of_the_other_kind_say_nothing(pace):
    """A probe's time shows in the steps that follow it."""
    watch, costs, steps = pace
    for _ in range(20):
        watch(True, 0.1)
        for _ in range(steps - 1):
            watch(False, 9.0)
    assert costs.learned == [(0.0, 1.0), (0.0, 1.0)]


TRUE_SECONDS = {1: 3.1, 8: 4.8, 17: 5.3, 33: 5.9}


@pytest.mark.parametrize("best", ["none", "a draft"])
@pytest.mark.parametrize("wrong", [{1: 2.5}, {8: 0.4, 17: 0.4, 33: 0.4}, {8: 3.0, 17: 3.0, 33: 3.0}, {}])
@pytest.mark.parametrize("busy", [(0, 0), (150, 700), (150, 230), (230, 330)])
def test_a_wrong_measurement_at_start_or_a_busy_moment_rules_out_nothing(monkeypatch, best, wrong, busy):
    """Steps of `TRUE_SECONDS`, three times that between the `busy` ones; the start measured them wrong by factors."""
    module, now = adaptive(), [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(
        module, "get_parallel", lambda: types.SimpleNamespace(tp_group=types.SimpleNamespace(world_size=1))
    )
    measured = {width: {1: (wrong.get(width, 1.0) * s, 0.0)} for width, s in TRUE_SECONDS.items()}
    policy = module.WidthPolicy(list(TRUE_SECONDS), module.StepCosts(measured))
    policy.costs.forget()
    state = types.SimpleNamespace(
        policy=policy, _steps=0, _pending=module.deque(), _host_is_hidden=True, _use=lambda _: None, _drafts=False,
        _pace=[], _end=types.SimpleNamespace(query=lambda: False, record=lambda: None),
    )  # fmt: skip
    state._watch_pace = lambda *what: module.AdaptiveWidth._watch_pace(state, *what)
    batch = types.SimpleNamespace(seq_lens_cpu=torch.tensor([1000]))
    said = torch.log(torch.tensor([[1.0, 0.3 if best == "none" else 0.9] + [0.02] * 31]))
    rng, chosen = np.random.default_rng(0), []
    for step in range(6000):
        width = module.AdaptiveWidth.choose(state, batch)
        chosen.append(width)
        nodes = torch.zeros(1, 8, dtype=torch.int64)
        nodes[0, 1] = int(width > 1 and rng.random() < said[0, 1].exp())
        path, drafted = types.SimpleNamespace(nodes=nodes), types.SimpleNamespace(masses=said)
        module.AdaptiveWidth.record(state, path, drafted, width)
        now[0] += TRUE_SECONDS[width] * (3 if busy[0] <= step < busy[1] else 1)
    tokens = {width: 1.0 if width == 1 else 1.0 + said[0, 1].exp().item() for width in TRUE_SECONDS}
    late = chosen[3000:]
    speed = sum(tokens[width] for width in late) / sum(TRUE_SECONDS[width] for width in late)
    assert speed > 0.97 * max(tokens[width] / TRUE_SECONDS[width] for width in TRUE_SECONDS)

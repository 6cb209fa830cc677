"""What surrounds the captured tail of the target's graph, without a GPU."""

from __future__ import annotations

import types

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


class Sm120MLABackend:
    """By its name upstream knows that it needs no mask for a chain."""


@pytest.mark.parametrize("is_draft", [False, True])
def test_the_target_is_captured_with_a_tree_and_the_drafter_without(monkeypatch, is_draft):
    """What DFLASH captures for our backend is causal: a replay of it would verify trees as if they were chains."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang_sm120.ddtree import ALGORITHM_NAME, algorithm

    load_plugins()
    monkeypatch.setattr(algorithm, "_is_ddtree", lambda: True)
    runner = types.SimpleNamespace(
        spec_algorithm=SpeculativeAlgorithm.from_string(ALGORITHM_NAME),
        attn_backend=Sm120MLABackend(),
        is_draft_worker=is_draft,
    )
    graphs = types.SimpleNamespace(
        model_runner=runner, captured_req_width=9, _capture_ragged_verify_layout=lambda _tokens: None
    )
    spec_info = DecodeCudaGraphRunner.get_spec_info(graphs, 9)
    assert spec_info.draft_token_num == 9 and spec_info.custom_mask is None
    assert getattr(spec_info, "has_tree_words", False) is not is_draft

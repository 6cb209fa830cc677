"""The bench's prompts, and its page on a made-up profile and table."""

from __future__ import annotations

import gzip
import itertools
import json
import types
from pathlib import Path

import pytest

from tools import bench_ddtree, bench_run, ddtree_page

# (name, microseconds, launch): launch 1 is a plain kernel, 2 the draft graph, 3 the target graph.
STEP = [
    ("_open", 2, 1),
    ("attention", 50, 2),
    ("nvjet_lm_head", 20, 2),
    ("topk", 8, 2),
    ("_build", 12, 2),
    ("_stage", 2, 1),
    ("mla_verify", 400, 3),
    ("lm_head_gemm", 30, 3),
    ("argmax", 5, 3),
    ("_walk", 4, 3),
    ("move_kv_kernel", 6, 3),
    ("draft_kv_gemm", 7, 3),
]


def write_trace(path: Path, waits_in_step: int) -> None:
    """Four steps of 1000 microseconds; the host launches each in its first 300, and waits once after that."""
    events = []
    for step in range(4):
        launches = {}
        at = begin = 1000.0 * step
        for name, microseconds, kind in STEP:
            correlation = 100 * step + (10 * kind if kind > 1 else len(launches))
            if correlation not in launches:
                launches[correlation] = len(launches)
                call = "cudaGraphLaunch" if kind > 1 else "cudaLaunchKernel"
                when = begin + 60.0 * launches[correlation]
                events.append(event("cuda_runtime", call, when, 10, correlation))
            events.append(event("kernel", name, at, microseconds, correlation))
            at += microseconds
        for wait in range(waits_in_step):
            events.append(event("cuda_runtime", "cudaStreamSynchronize", begin + 20 + wait, 1, -1))
        events.append(event("cuda_runtime", "cudaEventSynchronize", begin + 900, 50, -1))
        events.append(event("user_annotation", "step[VERIFY bs=4]", begin, 300, -1))
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))


def event(category: str, name: str, begin: float, microseconds: float, correlation: int) -> dict:
    return {"cat": category, "name": name, "ts": begin, "dur": microseconds, "args": {"correlation": correlation}}


@pytest.mark.parametrize("waits", [0, 2])
def test_a_profile_is_told_apart_into_forwards_tree_and_waits(tmp_path, waits):
    write_trace(tmp_path / "trace-bs1.json.gz", waits)
    row = ddtree_page.profile_row(tmp_path / "trace-bs1.json.gz")
    assert row["bs"] == 4, "what ran, whatever the file is called"
    assert row["steps"] == 3, "the last step has no end"
    assert (row["draft_forward_us"], row["target_forward_us"]) == (70.0, 430.0)
    assert row["draft_kv_us"] == 7
    assert row["tree_us"] == 2 + 8 + 12 + 2 + 5 + 4 + 6 and row["tree_in_graphs_us"] == row["tree_us"] - 4
    assert row["period_us"] == 1000.0
    assert row["host_waits"] == waits, "the wait for the results of the step before is not one in the step"
    assert row["kernels_us"]["_build"] == 12.0


def test_the_page_shows_how_far_adaptive_is_from_the_best(tmp_path):
    pytest.importorskip("matplotlib")
    speeds = {"none": 100.0, "chain": 150.0, "tree": 200.0, "adaptive": 198.0}
    without = {"ctx": 8192, "bs": 1, "none_tok_s": 90.0, "chain_tok_s": 120.0, "chain_accept_len": 2.0}
    row = {"ctx": 1024, "bs": 1, "chain_accept_len": 2.5, "tree_accept_len": 3.2}
    row |= {f"{mode}_tok_s": speed for mode, speed in speeds.items()} | {"learning_tok_s": [150.0, 190.0]}
    for one, modes in ((row, speeds), (without, ("none", "chain"))):
        one |= {f"{mode}_repeats_tok_s": [[100.0] * 3] * 8 for mode in modes}
    greedy = {"prompts": 16, "identical": 15, "ties": 1, "errors": [], "noise": 0.1}
    run = {"gpu": "a GPU", "torch": "2", "kernel_hash": "0" * 64, "budget": 32, "layers": 32, "rows": [row, without]}
    (tmp_path / "server-run.json").write_text(json.dumps(run | {"equal": {"tree against none": greedy}}))
    write_trace(tmp_path / "trace-bs1.json.gz", 0)
    docs = tmp_path / "docs"
    docs.mkdir()
    ddtree_page.render(tmp_path, docs)
    page = (docs / "ddtree.md").read_text()
    assert "| 1,024 | 1 | 100 | 150 | 200 | 198 | 0.99 | 150 | 2.50 | 3.20 | - | 24 |" in page
    assert "| 8,192 | 1 | 90 | 120 | - | - | - | - | 2.00 | - | - | 24 |" in page
    assert "| 4 | 1,000 | 70 | 430 | 7 | 39 | 35 | 0 |" in page
    assert "| tree against none | 16 | 15 | 1 | 0 |" in page
    assert (docs / "ddtree.png").stat().st_size > 0 and json.loads((docs / "ddtree.json").read_text())["profiles"]


def test_servers_of_small_batches_have_room_for_the_profiled_ones(tmp_path):
    most = max(batch for batch, _ in bench_ddtree.PROFILED)
    for flags in bench_ddtree.variants(tmp_path, [1024], [1]).values():
        assert flags[flags.index("--max-running-requests") + 1] == str(most)
        at = flags.index("--cuda-graph-bs-decode") + 1
        assert flags[at : at + 2] == ["1", str(most)]


@pytest.mark.parametrize("context, batch, shared", [(1000, 4, False), (bench_ddtree.DISTINCT_TOKENS // 2, 4, True)])
def test_long_prompts_share_what_the_prefix_cache_can_hold(context, batch, shared):
    text = list(range(1000, 20_000))
    made, later = (bench_ddtree.prompts(text, context, batch, at) for at in (0, batch))
    assert [len(prompt) for prompt in made] == [context] * batch
    endings = [tuple(prompt[-bench_ddtree.TEXT_TOKENS :]) for prompt in made + later]
    assert len(set(endings)) == 2 * batch and set(itertools.chain(*endings)) <= set(text)
    fillers = [prompt[: -bench_ddtree.TEXT_TOKENS] for prompt in made]
    assert set(itertools.chain(*fillers)) <= set(bench_ddtree.grow_pair.FILLERS)
    assert (fillers[0] == fillers[2]) is shared and fillers[0] != fillers[1]
    assert fillers == [prompt[: -bench_ddtree.TEXT_TOKENS] for prompt in later]


def test_a_batch_has_as_many_fillers_as_it_needs():
    made = bench_ddtree.prompts(list(range(20_000)), 1024, 32)
    assert len({tuple(prompt[:2]) for prompt in made}) == 32
    assert [len(prompt) for prompt in bench_ddtree.prompts(list(range(20_000)), 64, 3)] == [64] * 3


def two_requests():
    """A server of two: one commits 4 tokens a step of 10 ms; the other 2, with faster steps once it is alone.

    What the prompts take is unlike at each call; what has been asked for is kept.
    """
    asked: list[int] = []

    def post(_path, body, _timeout_s):
        asked.append(tokens := json.loads(body)["sampling_params"]["max_new_tokens"])
        fast, slow = tokens // 4, tokens // 2
        prompts_s = 0.1 * len(asked)
        ends = prompts_s + 0.01 * fast, prompts_s + 0.01 * fast + 0.004 * (slow - fast)
        prompts = {"prefill_finished_time": prompts_s}, {"prefill_finished_time": prompts_s - 0.05}
        return [
            {"meta_info": {"request_finished_ts": end, "e2e_latency": end, "spec_verify_ct": steps} | prompt}
            for end, steps, prompt in zip(ends, (fast, slow), prompts, strict=True)
        ]

    return types.SimpleNamespace(post=post, asked=asked)


def test_a_step_is_timed_while_all_of_the_batch_runs():
    up, tokens = two_requests(), bench_ddtree.ANSWER_TOKENS
    begun = [bench_ddtree.answer(up, "[]", 8) for _ in range(3)]
    rate, accepted = bench_ddtree.decoded(begun, bench_ddtree.answer(up, "[]", 8 + tokens), tokens)
    assert (rate, accepted) == (pytest.approx(6 / 0.01), pytest.approx(3.0))


@pytest.mark.parametrize(
    "late_after, batch, rounds", [(99, 2, bench_ddtree.ROUNDS), (99, 8, bench_ddtree.ROUNDS_OF_ONE), (4, 8, 4)]
)
def test_modes_take_turns_round_after_round_until_time_is_over(monkeypatch, tmp_path, late_after, batch, rounds):
    monkeypatch.setattr(bench_ddtree, "LEARNING_S", 0.0)
    monkeypatch.setattr(bench_ddtree, "LEARNING_STEPS", 0)
    ups = {mode: two_requests() for mode in ("chain", "adaptive")}
    lates = iter([False] * (late_after - 1))
    run = bench_run.Run(tmp_path, 0.0, ups=ups)
    monkeypatch.setattr(run, "late", lambda: next(lates, True))
    monkeypatch.setattr(run, "save", lambda: None)
    bench_ddtree.measure(run, list(range(20_000)), 1024, batch)
    (row,) = run.results["rows"]
    texts = bench_ddtree.TEXTS // batch
    for mode, up in ups.items():
        assert [len(text) for text in row[f"{mode}_repeats_tok_s"]] == [rounds] * texts
        assert row[f"{mode}_tok_s"] == pytest.approx(6 / 0.01) and row[f"{mode}_accept_len"] == pytest.approx(3.0)
        long = sum(tokens > bench_ddtree.ANSWER_TOKENS for tokens in up.asked)
        assert long == rounds * texts, "no more is answered than is kept"


def test_the_adaptive_width_learns_for_some_steps_however_slow(monkeypatch):
    monkeypatch.setattr(bench_ddtree, "LEARNING_S", 0.0)
    rates = bench_ddtree.learn(two_requests(), ["[]"], 8)
    steps = (8 + bench_ddtree.ANSWER_TOKENS) // 4
    assert len(rates) == -(-bench_ddtree.LEARNING_STEPS // steps) > 1
    assert rates == pytest.approx([6 / 0.01] * len(rates))

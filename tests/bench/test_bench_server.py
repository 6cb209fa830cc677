"""The benches of servers: what a server that is missing or fails costs, and what a run resumes."""

from __future__ import annotations

import argparse
import json
import math
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tools import bench_ddtree, bench_run, bench_server, greedy, kernels, server, server_page


@pytest.fixture
def run(tmp_path, monkeypatch) -> bench_run.Run:
    monkeypatch.setattr(bench_run, "write_result", lambda path, result: path.write_text(json.dumps(result)))
    return bench_run.Run(tmp_path, math.inf)


def meta_info(asked: dict[str, Any], seconds: float, accept: int = 1) -> dict[str, Any]:
    tokens = asked["sampling_params"]["max_new_tokens"]
    times = {"e2e_latency": seconds, "prefill_finished_time": 7e8, "request_finished_ts": 7e8 + seconds}
    return {"meta_info": times | {"completion_tokens": tokens, "spec_verify_ct": tokens / accept}}


def answering(step_s: float, accept: int = 1) -> server.Server:
    """A server whose steps take `step_s` and give `accept` tokens."""

    def post(_path: str, body: dict[str, Any] | bytes, _timeout_s: float = 0) -> list[dict[str, Any]]:
        asked = body if isinstance(body, dict) else json.loads(body)
        return [meta_info(asked, step_s * asked["sampling_params"]["max_new_tokens"] / accept, accept)] * len(
            asked["input_ids"]
        )

    up = server.Server("http://nowhere", Path("log"), Mock())
    up.post, up.get = post, lambda _path: ""
    return up


def test_whatever_fails_costs_only_itself(run):
    with run.attempt("a cell"):
        raise KeyError("stock")
    assert run.results["absent"] == {"a cell": "KeyError: 'stock'"}


def test_a_missing_side_is_told_and_taken_again(run):
    run.ups["ours-plain-auto"] = answering(0.01)
    bench_server.time_prefill(run, "auto", 8, 16)
    assert run.results["prefill"] == [
        {"kv_dtype": "auto", "from": 8, "to": 16, "flashinfer_s": None, "ours_s": pytest.approx(0.01)}
    ]
    bench_server.measure(run, bench_server.prompt_ids(0, 64), ["plain"], 64, 2, "auto")
    bench_server.measure(run, bench_server.prompt_ids(0, 64), ["chain-q8"], 64, 2, "auto")
    (row,) = run.results["rows"]
    assert (row["stock_step_ms"], row["ours_step_ms"]) == (None, pytest.approx(10))
    assert row["kernel_hash"] == kernels.source_hash()
    assert bench_server.measured(run.out / "server-run.json") == set()
    page = server_page.markdown(run.results | {"gpu": "a GPU", "torch": "2"})
    assert "| plain | auto | 2 | 64 | - | 200 | - | 10.00 | - |" in page
    assert "| auto | - | 0.01 | - |" in page


def test_modes_that_stock_serves_alike_are_measured_together_and_steps_are_counted(run):
    run.ups["stock-chain-q8-auto"] = answering(0.04, accept=4)
    run.ups["ours-chain-q8-auto"] = answering(0.02, accept=4)
    run.ups["ours-ddtree-q8-auto"] = answering(0.01, accept=2)
    (modes,) = bench_server.by_width(["chain-q8", "ddtree-q8"])
    bench_server.measure(run, bench_server.prompt_ids(0, 64), modes, 64, 1, "auto")
    chain, tree = run.results["rows"]
    assert (chain["mode"], tree["mode"]) == ("chain-q8", "ddtree-q8")
    assert [row["stock_step_ms"] for row in (chain, tree)] == [pytest.approx(40, rel=1e-3)] * 2
    assert [row["ours_step_ms"] for row in (chain, tree)] == pytest.approx([20, 10], rel=1e-3)
    assert (tree["stock_tok_s"], tree["ours_tok_s"]) == (pytest.approx(100, 1e-3), pytest.approx(400, 1e-3))
    assert bench_server.by_width(bench_server.MODES) == [
        ["plain"],
        ["chain-q8", "ddtree-q8"],
        ["chain-q16", "ddtree-q16"],
    ]


@pytest.mark.parametrize(
    "step_s, row_s, turns",
    [(0.01, math.inf, bench_server.MOST_REPEATS), (0.01, 0.0, bench_server.REPEATS), (0.5, math.inf, 2)],
)
def test_short_steps_are_taken_more_often_while_there_is_time(run, monkeypatch, step_s, row_s, turns):
    monkeypatch.setattr(bench_server, "ROW_S", row_s)
    run.ups["stock-plain-auto"], run.ups["ours-plain-auto"] = answering(step_s), answering(step_s)
    bench_server.measure(run, bench_server.prompt_ids(0, 64), ["plain"], 64, 1, "auto")
    assert run.results["rows"][0]["turns"] == turns


def test_the_chain_by_ddtree_needs_one_server_more(run, monkeypatch):
    monkeypatch.setattr(bench_server.tiny_model, "write_drafter", lambda folder, *_, **__: folder)
    asked = argparse.Namespace(work=run.out, contexts=[64], modes=["chain-q8", "ddtree-q8"], kv_dtypes=["auto"], gpus=1)
    flags = bench_server.variants(asked, run.out)
    assert sorted(flags) == ["ours-chain-q8-auto", "ours-ddtree-q8-auto", "stock-chain-q8-auto"]
    assert flags["ours-ddtree-q8-auto"][flags["ours-ddtree-q8-auto"].index("--speculative-ddtree-budget") + 1] == "7"


@pytest.mark.parametrize("step_s", [0.004, 0.4])
def test_requests_that_come_one_after_the_other_are_timed_together(run, step_s):
    """A step takes `step_s` a running request, and a request comes every half second."""

    def post(_path, body, _timeout_s=0):
        asked = json.loads(body)
        left: list[int] = []
        now, done_s = 0.0, []
        coming = [0.5 * i for i in range(len(asked["input_ids"]))]
        while coming or left:
            now = now if left else max(now, coming[0])
            while coming and now >= coming[0]:
                coming, left = coming[1:], [*left, asked["sampling_params"]["max_new_tokens"]]
            now += step_s * len(left)
            done_s += [now] * left.count(1)
            left = [n - 1 for n in left if n > 1]
        return [meta_info(asked, seconds) for seconds in done_s]

    run.ups["ours-plain-auto"] = up = answering(0)
    up.post = post
    bench_server.measure(run, bench_server.prompt_ids(0, 64), ["plain"], 64, 4, "auto")
    assert run.results["rows"][0]["ours_step_ms"] == pytest.approx(4 * 1e3 * step_s, rel=0.1)


def test_without_the_servers_of_a_comparison_the_table_is_still_measured(run, monkeypatch):
    monkeypatch.setattr(bench_server.tiny_model, "write", lambda work, **_: work)
    monkeypatch.setattr(bench_server, "equal_variants", lambda *_: {"triton": []})
    monkeypatch.setattr(bench_server.grow_pair, "grow", lambda work, **_: work)
    monkeypatch.setattr(bench_server, "held_out_tokens", lambda _pair: list(range(100_000)))

    @contextmanager
    def running(_model, log, *_):
        if log.stem == "triton":
            raise RuntimeError("out of memory")
        yield answering(0.01)

    monkeypatch.setattr(server, "running", running)
    asked = argparse.Namespace(
        work=run.out,
        contexts=[64],
        batches=[1],
        modes=["plain"],
        kv_dtypes=["fp8_e4m3"],
        gpus=1,
        equal=True,
        resume=None,
    )
    bench_server.bench(run, asked)
    assert [row["kv_dtype"] for row in run.results["rows"]] == ["fp8_e4m3"]
    assert {"control of trained-ours", "triton"} <= run.results["absent"].keys()


def test_servers_of_a_gpu_get_its_part_of_the_cpus():
    parts = [bench_run.cpus_of(["--base-gpu-id", str(gpu)], set(range(3, 35)), 2) for gpu in range(2)]
    assert parts == [set(range(3, 19)), set(range(19, 35))]
    assert bench_run.cpus_of(["--tp-size", "2"], {4, 5}, 2) == {4, 5}
    assert bench_run.cpus_of(["--base-gpu-id", "1"], {4}, 2) == {4}


def test_servers_that_are_only_compared_end_before_the_table(run, monkeypatch):
    ended = []

    @contextmanager
    def running(_model, log, *_):
        yield answering(0.01)
        ended.append(log.stem)

    monkeypatch.setattr(server, "running", running)
    with bench_run.ExitStack() as stack:
        run.launch(stack, run.out, {"ours-plain-auto": [], "triton": []})
        run.end(["triton"])
        assert ended == ["triton"] and list(run.ups) == ["ours-plain-auto"]
    assert ended == ["triton", "ours-plain-auto"]


def test_the_tree_bench_goes_on_without_a_mode_and_a_profile(run, monkeypatch):
    monkeypatch.setattr(bench_ddtree.grow_pair, "grow", lambda work, **_: work)
    monkeypatch.setattr(bench_ddtree, "held_out_tokens", lambda _pair: list(range(100)))
    monkeypatch.setattr(greedy, "compare", lambda *_: None)

    @contextmanager
    def running(_model, log, *_):
        if log.stem in ("tree", "adaptive"):
            raise RuntimeError("out of memory")
        yield answering(0.01)

    monkeypatch.setattr(server, "running", running)
    run.results["rows"] = [{"ctx": 32, "bs": 1}]
    bench_ddtree.measure_all(run, run.out, [32, 64], [1])
    _, row = run.results["rows"]
    assert (row["none_tok_s"], row["chain_tok_s"]) == (pytest.approx(100), pytest.approx(100))
    assert "tree_tok_s" not in row and row["none_accept_len"] == 1
    assert {"tree", "adaptive", "profile of batch 1", "profile of batch 16"} <= set(run.results["absent"])


def test_the_tree_bench_goes_on_where_another_run_ended(run):
    results = bench_ddtree.so_far(run.out)
    assert results["rows"] == []
    path = run.out / "server-run.json"
    path.write_text(json.dumps(results | {"rows": [{"ctx": 64, "bs": 1}], "absent": {"a": "b"}, "gpu": "a GPU"}))
    assert bench_ddtree.so_far(run.out) == results | {"rows": [{"ctx": 64, "bs": 1}]}
    path.write_text(json.dumps(results | {"rows": [{"ctx": 64, "bs": 1}], "kernel_hash": "other"}))
    assert bench_ddtree.so_far(run.out)["rows"] == []


def says(*tokens: tuple[int, float, float]) -> list[dict[str, Any]]:
    """The answer to one prompt: (token, its log-probability, how far the second is behind)."""
    chosen = [(log_prob, token, None) for token, log_prob, _ in tokens]
    top = [[(log_prob, token, None), (log_prob - gap, -1, None)] for token, log_prob, gap in tokens]
    return [{"meta_info": {"output_token_logprobs": chosen, "output_top_logprobs": top}}]


def test_an_error_does_not_make_itself_a_tie():
    """Attention that errs shifts every log-probability: by its own noise all that follows would be a tie."""
    want = says((5, -1.0, 2.0), (6, -0.5, 1.5), (7, -0.5, 3.0))
    wrong = says((5, -2.0, 0.1), (9, -0.1, 4.0), (7, -0.5, 3.0))
    itself = greedy.compare_greedy(want, wrong)
    judged = greedy.compare_greedy(want, wrong, yardstick=0.1)
    assert itself["noise"] == judged["noise"] == pytest.approx(1.0) and itself["positions"] == 1
    assert (itself["ties"], itself["errors"], itself["tie_gap"]) == (1, [], pytest.approx(2.0))
    assert (judged["ties"], judged["tie_gap"]) == (0, pytest.approx(0.2))
    assert judged["errors"] == [{"prompt": 0, "at": 1, "gap": pytest.approx(1.5)}]
    assert greedy.compare_greedy(want, want, yardstick=0.1)["identical"] == 1


def test_the_yardstick_is_for_pairs_whose_kv_has_one_dtype(run, monkeypatch):
    right, near, wrong = says((5, -1.0, 0.3)), says((5, -1.1, 0.3)), says((8, -0.2, 0.3))
    answers = {"triton": right, "stock": near, "ours": wrong, "ours-fp8": wrong}
    run.ups = {name: name for name in answers}
    monkeypatch.setattr(greedy, "greedy", lambda name, _prompts: answers[name])
    pairs = [("triton", name) for name in ("stock", "ours", "ours-fp8")]
    assert greedy.compare(run, pairs, [[1]], pairs[0]) == pytest.approx(0.1)
    gaps = [found["tie_gap"] for found in run.results["equal"].values()]
    assert gaps == [pytest.approx(0.2), pytest.approx(0.2), 0.0]
    assert len(run.results["equal"]["ours against triton"]["errors"]) == 1

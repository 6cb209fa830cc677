"""make bench-e2e: what it starts, that it resumes, what it writes; and one real run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from tools import bench_e2e, server

MEASURED = dict.fromkeys(bench_e2e.KEPT, 2.0)


def plan(**changes: object) -> bench_e2e.Plan:
    words = ["--cpu", "--model", "m", "--draft", "d", "--contexts", "64", "128", "--batches", "1", "2"]
    args = vars(bench_e2e.parser().parse_args(words))
    del args["out"]
    return bench_e2e.Plan(**args | changes)


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, dict[str, str]]]:
    """Servers that only say how much room they have; (speculation, environment) of each start."""
    starts = []

    @contextmanager
    def running(model, log, flags, env, defaults, timeout_s):
        starts.append((" ".join(flags), env))
        up = server.Server("http://nowhere", log)
        up.get = lambda _path: json.dumps({"max_total_num_tokens": 10_000, "attention_backend": "x"})
        yield up

    monkeypatch.setattr(bench_e2e.server, "running", running)
    return starts


def cells(out: Path) -> dict[str, dict]:
    return json.loads((out / "bench-e2e.json").read_text())["cells"]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch, started):
    measured = []

    def measure(_plan, _up, context, batch, _out):
        if len(measured) == 5:
            raise KeyboardInterrupt
        measured.append((context, batch))
        return MEASURED

    monkeypatch.setattr(bench_e2e, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        bench_e2e.run(plan(), tmp_path)
    assert len(cells(tmp_path)) == 5
    measured = [None] * 6  # the limit is behind
    assert bench_e2e.run(plan(), tmp_path) == 0
    assert measured[6:] == [(64, 2), (128, 1), (128, 2), (64, 1), (64, 2), (128, 1), (128, 2)]
    assert len(started) == 4  # plain, dflash; then dflash again and ddtree: plain was whole
    assert bench_e2e.run(plan(), tmp_path) == 0
    assert len(started) == 4


def test_failures_are_kept_apart_and_tried_again(tmp_path, monkeypatch, started, capsys):
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: {"failed": "no answer"})
    assert bench_e2e.run(plan(modes=["plain"]), tmp_path) == 4
    assert "failed: ours/plain/64/1: no answer" in capsys.readouterr().err
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: MEASURED)
    assert bench_e2e.run(plan(modes=["plain"]), tmp_path) == 0


def test_a_server_that_does_not_start_does_not_end_the_run(tmp_path, monkeypatch, started):
    def dead(*_args):
        raise RuntimeError("the server exited with 1")

    monkeypatch.setattr(bench_e2e.server, "running", dead)
    assert bench_e2e.run(plan(), tmp_path) == 12
    assert "the server did not start; see" in cells(tmp_path)["ours/dflash/64/1"]["failed"]


def test_what_does_not_fit_the_pool_is_left_out(tmp_path, monkeypatch, started):
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: MEASURED)
    assert bench_e2e.run(plan(modes=["plain"], contexts=[64, 9000]), tmp_path) == 0
    assert cells(tmp_path)["ours/plain/9000/2"] == {"left_out": "needs more than the pool of 10000 tokens"}
    assert cells(tmp_path)["ours/plain/9000/1"] == MEASURED


def test_one_table_has_one_set_up(tmp_path, monkeypatch, started):
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: MEASURED)
    bench_e2e.run(plan(), tmp_path)
    with pytest.raises(SystemExit, match="was measured with model 'm', this is 'other': give another --out"):
        bench_e2e.run(plan(model="other"), tmp_path)


def test_on_gpus_stock_runs_without_our_plugin(tmp_path, monkeypatch, started):
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: MEASURED)
    monkeypatch.setattr(bench_e2e.torch.cuda, "get_device_name", lambda: "a GPU")
    bench_e2e.run(plan(cpu=False, serve_flags="--tp 8"), tmp_path)
    found = [
        (flags.replace(" --speculative-draft-model-path d", ""), env.get("SGLANG_PLUGINS")) for flags, env in started
    ]
    ours = "--tp 8 --attention-backend sm120_mla"
    assert found == [
        ("--tp 8", "stock"),
        (ours, None),
        ("--tp 8 --speculative-algorithm DFLASH", "stock"),
        (f"{ours} --speculative-algorithm DFLASH", None),
        (f"{ours} --speculative-algorithm DDTREE", None),
    ]


def test_the_page_compares_ddtree_with_stock_dflash(tmp_path):
    fast = MEASURED | {"output_throughput": 30.0}
    document = {
        "identity": plan().identity(),
        "servers": {},
        "cells": {"stock/dflash/64/1": MEASURED, "ours/ddtree/64/1": fast, "ours/plain/64/1": {"failed": "x"}},
    }
    bench_e2e.render(document, tmp_path)
    lines = (tmp_path / "bench-e2e.md").read_text().splitlines()
    assert "| ddtree | 64 | 1 | 2.0 | 30.0 | 15.00 | 2.00 | 2.00 | 2 | 2 | 2.00 |" in lines
    assert "| plain | 64 | 1 | - | - | - | - | - | - | - | - |" in lines
    assert (tmp_path / "bench-e2e.png").stat().st_size > 1000


def test_without_a_gpu_it_refuses(monkeypatch, capsys):
    monkeypatch.setattr(bench_e2e.torch.cuda, "is_available", lambda: False)
    assert bench_e2e.main(["--model", "m"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_on_the_cpu_with_upstreams_client(tmp_path):
    """Upstream's client imports `datasets` for data that this bench does not use: an empty module stands in for it."""
    (tmp_path / "datasets.py").write_text("load_dataset = None\n")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from tools.bench_e2e import main; sys.exit(main())"
    words = ["--cpu", "--modes", "ddtree", "--contexts", "32", "--batches", "1", "2", "--rounds", "1"]
    words += ["--output-tokens", "8", "--out", str(tmp_path / "out")]

    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run([sys.executable, "-c", code, *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = cells(tmp_path / "out")
    assert set(found) == {"ours/ddtree/32/1", "ours/ddtree/32/2"}
    assert all(cell["output_throughput"] > 0 for cell in found.values())
    assert "| ddtree | 32 | 2 |" in (tmp_path / "out" / "bench-e2e.md").read_text()

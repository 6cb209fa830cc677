"""make bench-e2e: what it starts, that it resumes, what it writes; and one real run on the CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from tools import bench_e2e, e2e_page, server

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
        up = server.Server("http://nowhere", log, Mock())
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
    assert (tmp_path / "bench-e2e.md").read_text().count("| dflash |") == 1
    measured = [None] * 6  # the limit is behind
    assert bench_e2e.run(plan(), tmp_path) == 0
    assert measured[6:] == [(64, 2), (128, 1), (128, 2), (64, 1), (64, 2), (128, 1), (128, 2)]
    assert len(started) == 4  # plain, dflash; then dflash again and ddtree: plain was whole
    assert bench_e2e.run(plan(), tmp_path) == 0
    assert len(started) == 4


def test_servers_that_are_up_together_take_turns_until_time_is_over(tmp_path, monkeypatch, started, capsys):
    clock, measured = [0.0], []
    monkeypatch.setattr(bench_e2e.time, "monotonic", lambda: clock[0])

    def measure(_plan, up, context, batch, _out):
        measured.append((up.log.stem, context, batch))
        clock[0] += 20
        return MEASURED

    monkeypatch.setattr(bench_e2e, "measure", measure)
    assert bench_e2e.run(plan(together=True, minutes=1.1), tmp_path) == 8
    assert "no time left for 8 cells" in capsys.readouterr().err
    assert measured == [("ours-plain", 64, 1), ("ours-dflash", 64, 1), ("ours-ddtree", 64, 1), ("ours-plain", 64, 2)]
    assert bench_e2e.run(plan(together=True), tmp_path) == 0
    assert len(started) == 6 and len(measured) == 12


def test_failures_are_kept_apart_and_tried_again(tmp_path, monkeypatch, started, capsys):
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: {"failed": "no answer"})
    assert bench_e2e.run(plan(modes=["plain"]), tmp_path) == 4
    assert "failed: ours/plain/64/1: no answer" in capsys.readouterr().err
    monkeypatch.setattr(bench_e2e, "measure", lambda *_: MEASURED)
    assert bench_e2e.run(plan(modes=["dflash"]), tmp_path) == 0  # those of another mode are not asked for here
    assert bench_e2e.run(plan(modes=["plain"]), tmp_path) == 0


def test_a_server_that_dies_costs_its_own_cells(tmp_path, started):
    assert bench_e2e.run(plan(modes=["plain"], contexts=[64], batches=[1]), tmp_path) == 1
    assert "the client ended with 1; see" in cells(tmp_path)["ours/plain/64/1"]["failed"]


def test_a_server_that_does_not_start_does_not_end_the_run(tmp_path, monkeypatch, started):
    def dead(*_args):
        raise RuntimeError("the server exited with 1")

    monkeypatch.setattr(bench_e2e.server, "running", dead)
    assert bench_e2e.run(plan(), tmp_path) == 12
    assert cells(tmp_path)["ours/dflash/64/1"] == {"failed": "the server did not start"}


@pytest.fixture
def client(monkeypatch) -> list[list[str]]:
    """Upstream's client that is at once done; the flags of each call."""
    calls = []

    def call(flags, _log, _timeout_s):
        calls.append(flags)
        at = {flag: flags[flags.index(flag) + 1] for flag in ("--num-prompts", "--output-file")}
        Path(at["--output-file"]).write_text(json.dumps(MEASURED | {"completed": int(at["--num-prompts"])}))

    monkeypatch.setattr(bench_e2e, "call_client", call)
    return calls


def test_what_does_not_fit_the_pool_is_left_out(tmp_path, started, client):
    assert bench_e2e.run(plan(modes=["plain"], contexts=[64, 9000]), tmp_path) == 0
    assert cells(tmp_path)["ours/plain/9000/2"] == {"left_out": "needs more than the pool of 10000 tokens"}
    assert cells(tmp_path)["ours/plain/9000/1"] == MEASURED | {"completed": 3}


def test_prompts_are_excerpts_of_a_text(tmp_path, started, client):
    text = tmp_path / "text"
    text.write_text("".join(chr(ord("a") + i % 26) for i in range(600)))
    assert bench_e2e.run(plan(modes=["plain"], text=text, contexts=[64], batches=[2]), tmp_path) == 0
    (flags,) = client
    assert flags[flags.index("--dataset-name") + 1] == "random"  # upstream's name for a text cut to a random length
    rows = json.loads(Path(flags[flags.index("--dataset-path") + 1]).read_text())
    prompts = [row["conversations"][0]["value"] for row in rows]
    assert len(set(prompts)) == 6 and {len(prompt) for prompt in prompts} == {5 * 64}
    text.write_text("another")
    with pytest.raises(SystemExit, match="was measured with text_sha256"):
        bench_e2e.run(plan(modes=["plain"], text=text, contexts=[64], batches=[2]), tmp_path)


def test_a_client_that_hangs_is_ended(tmp_path):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        flags = ["--base-url", url, "--dataset-name", "random-ids", "--ready-check-timeout-sec", "60"]
        assert bench_e2e.call_client(flags, tmp_path / "log", 0.5) == "not done in 0 s"
    assert "ended with 2; see" in bench_e2e.call_client(["--no-such-flag"], tmp_path / "log", 60)
    assert "--no-such-flag" in (tmp_path / "log").read_text()


def test_nothing_is_asked_of_the_hub_for_a_model_in_folders(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    here = str(tmp_path)
    assert plan(model=here, draft=here).environment("ours") == {"HF_HUB_OFFLINE": "1"}
    assert plan(model=here, draft="a/name").environment("ours") == {"HF_HUB_OFFLINE": "0"}


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
        "notes": ["Taken on a rainy day."],
    }
    e2e_page.render(document, tmp_path)
    lines = (tmp_path / "bench-e2e.md").read_text().splitlines()
    assert "| ddtree | 64 | 1 | 2.0 | 30.0 | 15.00 | 2.00 | 2.00 | 2 | 2 | 2.00 | 2.00 |" in lines
    assert "| plain | 64 | 1 | - | - | - | - | - | - | - | - | - |" in lines
    assert "- Taken on a rainy day." in lines
    assert (tmp_path / "bench-e2e.png").stat().st_size > 1000


def test_without_a_gpu_it_refuses(monkeypatch, capsys):
    monkeypatch.setattr(bench_e2e.torch.cuda, "is_available", lambda: False)
    assert bench_e2e.main(["--model", "m"]) == 2
    assert "no CUDA device here" in capsys.readouterr().err


def test_on_the_cpu_with_upstreams_client(tmp_path):
    words = ["--cpu", "--modes", "ddtree", "--contexts", "32", "--batches", "1", "2", "--rounds", "1"]
    words += ["--output-tokens", "64", "--out", str(tmp_path / "out"), "--text", __file__]
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench_e2e", *words],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = cells(tmp_path / "out")
    assert set(found) == {"ours/ddtree/32/1", "ours/ddtree/32/2"}
    assert all(cell["output_throughput"] > 0 and cell["accept_length"] > 1.2 for cell in found.values())
    assert "| ddtree | 32 | 2 |" in (tmp_path / "out" / "bench-e2e.md").read_text()

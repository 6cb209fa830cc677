"""The parts of the defragmentation bench that a GPU runs, walked through on the CPU at a small size; and its page."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tools import bench_defrag, defrag_kernels, defrag_page, defrag_pool, defrag_traffic, kernels
from tools.churn import World

DOCS = Path(__file__).resolve().parents[2] / "docs" / "bench"


class OnTheCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")) == "cuda":
            kwargs["device"] = "cpu"
        return func(*("cpu" if isinstance(a, str) and a == "cuda" else a for a in args), **kwargs)


class Event:
    """A CUDA event for work that is done when it returns."""

    def __init__(self, **_: object) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1000


class Graph:
    """A CUDA graph that takes a millisecond."""

    def replay(self) -> None:
        time.sleep(0.001)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch):
    from sglang_sm120 import ops
    from sglang_sm120.kvdefrag import serving

    for name, fake in {
        "Event": Event,
        "CUDAGraph": Graph,
        "graph": lambda graph: graph,
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(serving, "move_bytes_per_s", lambda _: 3e9)
    monkeypatch.setattr(serving, "PASS_SHARE", 1.0)  # on a busy machine a pass takes long
    monkeypatch.setattr(ops, "mla_verify", lambda *_, **__: None)
    monkeypatch.setattr(defrag_pool, "median_ms", lambda call: call() and 1.0)
    with OnTheCpu():
        yield


def test_steps_compares_the_same_stretches_with_a_pass_at_every_look(no_gpu):
    result = defrag_pool.steps(layers=2, slots=16_384, requests=8, tokens=1_024, count=600, repeats=2)
    assert min(result["passes"]) >= 1, "a look in 256 steps or more, each with a pass"
    assert result["steps"] == 1200
    assert set(result["rise"]) == {"mean", "p50", "p95", "p98", "p99", "longest"}
    assert result["rise"]["mean"] == result["on"]["mean_ms"] / result["off"]["mean_ms"] - 1
    assert [len(means) for means in result["mean_ms_of_stretches"].values()] == [2, 2]


def test_compaction_counts_what_moves(no_gpu, monkeypatch):
    monkeypatch.setattr(defrag_pool, "churned", lambda device, size: churned_little(size))
    result = defrag_pool.compaction(layers=3, slots=16_384, rounds=2)
    assert result["passes"] == len(result["all"]) > 2
    assert all(p["bytes"] == 2 * p["units"] * 3 * 1152 > 0 for p in result["all"])
    assert result["gb_per_s"]["move"] >= result["gb_per_s"]["commit"] > result["gb_per_s"]["wall"] > 0
    assert result["mean_run_length_after"] > 2 * result["mean_run_length_before"]


def churned_little(size: int) -> World:
    world = World(size, max_requests=8, max_context=2_048, with_kv=False)
    for i in range(8):
        assert world.arrive([i] * 3, 10_000)
    for _ in range(1_000):
        world.step()
    return world


class Up:
    """A server that takes a while for each token, longer while tier 1 is on."""

    url = "http://none"

    def __init__(self, log: list) -> None:
        self._log, self._on = log, False

    def generate(self, prompts, tokens):
        self._log.append(("generate", self._on))
        time.sleep(1e-5 * tokens)

    def post(self, path, body):
        self._on = bool(body["server_args"]["sm120_kv_compact"])

    def get(self, path):
        assert path.startswith("/flush_cache")

    def info(self):
        state = {"refused_because": None, "passes": len(self._log) * self._on, "units_moved": 0, "host_seconds": 0.0}
        return {"internal_states": [{"sm120_kv": state}]}


def test_serve_takes_turns_and_keeps_every_round(no_gpu, monkeypatch, tmp_path):
    log: list = []
    from tools import tiny_model

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tiny_model, "write", lambda *_, **__: None)
    monkeypatch.setattr(defrag_traffic.server, "running", lambda *_, **__: nullcontext(Up(log)))
    monkeypatch.setattr(defrag_traffic, "_token_times", lambda up, prompt, tokens: iter(range(100)))
    saved: list[dict] = []
    result = defrag_traffic.serve(saved.append, requests=6, arrivals_per_s=1e4, repeats=3)
    assert [s["repeats"] for s in saved] == [1, 2, 3] and saved[-1] == result
    assert [case["tiers"] for case in result["cases"]] == list(defrag_traffic.TIERS)
    for case in result["cases"]:
        rates = [row["tokens_per_s"] for row in case["repeats"]]
        assert case["tokens_per_s"] == sorted(rates)[1]
        assert case["spread"] == pytest.approx((max(rates) - min(rates)) / sorted(rates)[1])
        assert case["against_off_from"] <= case["against_off"] <= case["against_off_to"]
    assert result["cases"][0]["against_off"] == 1


def test_the_kernel_reads_slots_as_the_bench_thinks(tmp_path):
    """`fastpath` changes one statement of it, on a GPU, where nobody should find out that it is another one."""
    sources = Path(shutil.copytree(kernels.SOURCES, tmp_path / "kernels"))
    defrag_kernels.read_no_indices(sources)
    assert kernels.source_hash(sources) != kernels.source_hash()
    with pytest.raises(RuntimeError, match="does not read slots"):
        defrag_kernels.read_no_indices(sources)


def test_a_part_that_fails_costs_only_itself(monkeypatch, tmp_path, capsys):
    def fail(*_: object) -> dict:
        raise RuntimeError("no such luck")

    out = tmp_path / "new" / "defrag.json"
    monkeypatch.setattr(defrag_pool, "churn", fail)
    monkeypatch.setattr(defrag_pool, "draw_map", lambda *_: {"passes": 3})
    monkeypatch.setattr("sys.argv", ["bench_defrag", "churn", "map", "--out", str(out)])
    with pytest.raises(SystemExit, match="failed: churn"):
        bench_defrag.main()
    assert "no such luck" in capsys.readouterr().err
    assert json.loads(out.read_text())["map"]["passes"] == 3


def test_two_runs_write_into_one_file_and_a_third_is_added(tmp_path, monkeypatch):
    out, other = tmp_path / "defrag.json", tmp_path / "other.json"
    bench_defrag.keep(out, "steps", {"a": 1})
    bench_defrag.keep(out, "serve", {"b": 2})
    other.write_text(json.dumps({"map": json.loads((DOCS / "defrag.json").read_text())["map"]}))
    monkeypatch.setattr(defrag_page, "render", lambda file: rendered.update(json.loads(file.read_text())))
    monkeypatch.setattr("sys.argv", ["bench_defrag", "render", "--add", str(other), "--out", str(out)])
    rendered: dict = {}
    bench_defrag.main()
    assert set(rendered) == {"steps", "serve", "map"}


@pytest.mark.parametrize("kept", [None, "churn on cpu", "kernel", "compaction", "serve"])
def test_the_page_shows_the_parts_there_are_and_the_sources_of_each(kept, tmp_path):
    results = json.loads((DOCS / "defrag.json").read_text())
    if kept:
        results = {kept: results[kept]}
    out = tmp_path / "part.json"
    out.write_text(json.dumps(results))
    defrag_page.render(out)
    page = out.with_suffix(".md").read_text()
    for name, part in results.items():
        assert f"## {defrag_page.SECTIONS[name][0]}" in page and part["machine"]["kernel_hash"][:12] in page
    assert page.count("\n## ") == len(results)

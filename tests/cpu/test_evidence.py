"""What a server tells about itself: metrics, the line at start, the doctor's facts; verify times without waiting."""

from __future__ import annotations

import _ctypes
import importlib.metadata
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from served import metric
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang_sm120 import cli, ops
from sglang_sm120.attention import graphs, metrics, report, select
from sglang_sm120.cpu import standin

from tools import server as launcher
from tools.kernels import ALL_ARCHS
from tools.pair import DRAFTER, TARGET


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = ["--dtype", "float32", "--enable-metrics", "--decode-log-interval", "1"]
    flags += ["--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFTER)]
    with launcher.running(TARGET, log, flags) as up:
        up.generate([list(range(3, 40))], 24)
        yield up


def test_metrics_of_a_chain(server):
    text = server.get("/metrics")
    steps = metric(text, 'sm120:attention_steps_total{mode="target_verify",path="reference"}')
    assert steps > 0
    assert metric(text, "sm120:verify_seconds_count") == steps
    assert 0 < metric(text, "sm120:verify_seconds_sum") < 600
    assert metric(text, "sglang:spec_accept_length") >= 1
    assert metric(text, "sm120:eager_fallbacks_total") == 0


def test_one_line_at_start(server):
    lines = [line for line in server.log.read_text().splitlines() if "sm120: GPU" in line]
    assert len(lines) == 1
    for fact in ("none (CPU engine)", "attention sm120_mla (asked for)", "KV float32", "page size 1",
                 "graph buckets none", "free memory"):  # fmt: skip
        assert fact in lines[0]


def test_the_doctor_finds_the_same_facts(server):
    (state,) = server.info()["internal_states"]
    facts = state[report.STATE_KEY]
    assert facts["attention"] == "sm120_mla (asked for)"


def test_every_hook_is_in_force(server):
    """Of one whose place upstream moved or renamed it logs a traceback, and serves without."""
    load_plugins()
    (state,) = server.info()["internal_states"]
    assert set(state[report.STATE_KEY]["hooks"].split(", ")) == set(HookRegistry._hooks)


def test_the_doctor_prints_them(server, capsys):
    cli.doctor(server.url)
    assert re.search(r"^server attention +sm120_mla \(asked for\)$", capsys.readouterr().out, re.MULTILINE)


NOTES = b"\0-v -arch sm_90 -m 64\0 -arch sm_80 -m 64\0 -arch sm_120a -m 64 -l\0"


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Where the kernel library is looked for; the file is not there yet."""
    monkeypatch.setattr(ops, "LIBRARY_PATH", tmp_path / "lib.so")
    caches = ops.library_targets, ops._library
    for cached in caches:
        cached.cache_clear()
    yield ops.LIBRARY_PATH
    for cached in caches:
        cached.cache_clear()


@pytest.mark.parametrize(
    ("capability", "said"),
    [
        ((12, 0), None),
        ((8, 6), None),  # takes code for sm_80
        ((12, 1), "not built for this GPU, sm_121: build the wheel with ARCHS=sm_121a before make"),
        ((10, 0), "the GPU is sm_100, kernels are for"),
    ],
)
def test_the_librarys_targets_are_compared_with_the_gpu(monkeypatch, library, capability, said):
    """The server refuses by these words, and the doctor says them."""
    library.write_bytes(NOTES)
    monkeypatch.setattr(ops, "_library", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    assert ops.library_targets() == ["sm_120a", "sm_80", "sm_90"]
    problems = [problem for problem in cli._problems() if "kernels" in problem or "GPU" in problem]
    assert said in problems[0] if said else problems == []


def test_what_is_built_can_be_named_in_archs():
    for name in ("sm_80", "sm_90", "sm_120a", "sm_121a"):
        assert name in ALL_ARCHS
        digits = name.removeprefix("sm_").removesuffix("a")
        assert ops._runs_on(name, (int(digits[:-1]), int(digits[-1])))


def test_a_library_that_does_not_load_is_found_before_it_is_called(library):
    assert "built without kernels" in ops.library_problem((12, 0))
    library.write_bytes(NOTES)
    assert "does not load" in ops.library_problem((12, 0)) and "make wheel" in ops.library_problem((12, 0))


def test_a_library_that_is_cut_short_is_not_loaded(library):
    """A disk that was full leaves one; the loader reads past its end, and the process is killed."""
    whole = Path(_ctypes.__file__).read_bytes()
    library.write_bytes(whole)
    assert not ops._is_cut_short(library)
    library.write_bytes(whole[: len(whole) // 2])
    assert "is cut short" in ops.library_problem((12, 0))


@pytest.mark.parametrize(
    ("symbols", "said"), [({"sm120_mla_abi": lambda: 2}, "has ABI 2, this package needs 3"), ({}, "sm120_mla_abi")]
)
def test_a_library_of_another_release_is_named_as_such(monkeypatch, library, symbols, said):
    """Before any function is looked for that it may not have."""
    library.write_bytes(NOTES)
    monkeypatch.setattr(ops.ctypes, "CDLL", lambda _: SimpleNamespace(**symbols))
    assert said in ops.library_problem((12, 0))


def test_the_doctor_names_what_a_gpu_lacks_without_upstreams_kernels(monkeypatch, capsys):
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
    monkeypatch.setattr(cli, "_problems", lambda: iter(()))
    monkeypatch.setattr(ops, "available", lambda: True)
    monkeypatch.setattr(standin, "is_needed", lambda: True)
    assert cli.doctor(None) == 1
    said = capsys.readouterr().out
    assert "NVIDIA H200, sm_90" in said and "only the CPU can serve: sgl_kernel is absent" in said


class Event:
    """A device event that is done when the test says so; waiting for it is an error."""

    done = False

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return Event.done

    def elapsed_time(self, _end: Event) -> float:
        return 250.0

    def synchronize(self) -> None:
        raise AssertionError("a verify step waited for the device")


@pytest.fixture
def observed(monkeypatch: pytest.MonkeyPatch):
    """Seconds that reach the histogram, with a mocked device and metrics on."""
    seen: list[float] = []
    monkeypatch.setattr(torch, "get_device_module", lambda *_: SimpleNamespace(Event=Event))
    monkeypatch.setattr(metrics, "reports", lambda: True)
    monkeypatch.setattr(metrics, "_verify_seconds", lambda: SimpleNamespace(observe=seen.append))
    monkeypatch.setattr(Event, "done", False)
    metrics._device_timer.cache_clear()
    yield seen
    metrics._device_timer.cache_clear()


def step(mode: str = "target_verify", *, draft: bool = False) -> None:
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: mode == "target_verify"))
    runner = SimpleNamespace(is_draft_worker=draft, device="cuda")
    assert metrics.observe_step(lambda *_: "output", runner, batch) == "output"


def test_verify_times_are_read_when_they_are_there(observed):
    step()
    step()
    assert observed == [], "no step may wait for its own time"
    Event.done = True
    step()
    assert observed == [0.25] * 3


def test_only_the_targets_verify_is_timed(observed):
    Event.done = True
    step(draft=True)
    step("decode")
    assert observed == []


def fallback(monkeypatch: pytest.MonkeyPatch, can_run: bool, **batch) -> list[str]:
    """Modes of the fallbacks that two equal verify steps counted."""
    counted: list[str] = []
    monkeypatch.setattr(metrics, "count_fallback", counted.append)
    monkeypatch.setattr(graphs, "_told", set())
    name = batch.pop("mode", "TARGET_VERIFY")
    mode = SimpleNamespace(name=name, is_decode=lambda: False, is_target_verify=lambda: name == "TARGET_VERIFY")
    graph_runner = SimpleNamespace(captured_req_width=17, max_bs=4)
    graphs_of = batch.pop("graphs", [1, 4])
    runner = SimpleNamespace(decode_cuda_graph_runner=graph_runner, decode_cuda_graph_capture_bs=graphs_of)
    spec = SimpleNamespace(num_tokens_per_req=batch.pop("width", 17))
    for _ in range(2):
        forward_batch = SimpleNamespace(forward_mode=mode, spec_info=spec, **batch)
        graphs.note_fallback(SimpleNamespace(can_run_graph=can_run), runner, forward_batch)
    return counted


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"batch_size": 2, "width": 9}, "captured for 17"),
        ({"batch_size": 5}, "--cuda-graph-max-bs-decode 4"),
        ({"batch_size": 2}, "DP padding"),
    ],
)
def test_a_fallback_is_counted_and_told_once_with_its_reason(monkeypatch, caplog, batch, reason):
    assert fallback(monkeypatch, False, **batch) == ["target_verify"] * 2
    assert len(caplog.records) == 1 and reason in caplog.text


def test_a_replay_is_no_fallback(monkeypatch, caplog):
    assert fallback(monkeypatch, True, batch_size=2) == []
    assert caplog.records == []


@pytest.mark.parametrize(
    ("asked", "prefill", "chosen", "why"),
    [
        ("sm120_mla", None, "sm120_mla", "asked for"),
        (None, None, "sm120_mla", "the default for MLA on sm_120 and sm_121"),
        (None, "flashinfer", "sm120_mla", "the default for MLA on sm_120 and sm_121"),
        (None, None, "triton", "upstream's default"),
        ("nsa", None, "dsa", "asked for"),
    ],
)
def test_why_a_backend_attends(monkeypatch, asked, prefill, chosen, why):
    monkeypatch.setattr(select, "is_auto_device", lambda: False)
    args = SimpleNamespace(attention_backend=asked, prefill_attention_backend=prefill, decode_attention_backend=None)
    assert select.reason(args, None, chosen) == why


@pytest.mark.parametrize(
    ("gpu", "problems", "cpu_engine", "code"),
    [(True, [], False, 0), (False, [], True, 1), (True, [], True, 1), (True, ["broken"], False, 2)],
)
def test_exit_codes_of_the_doctor(monkeypatch, capsys, gpu, problems, cpu_engine, code):
    """A script may rely on them: 0 a GPU can serve, 1 only the CPU can, 2 something is wrong."""
    monkeypatch.setattr(cli, "_facts", lambda: iter(()))
    monkeypatch.setattr(cli, "_problems", lambda: iter(problems))
    monkeypatch.setattr(ops, "available", lambda: gpu)
    monkeypatch.setattr(standin, "is_needed", lambda: cpu_engine)
    assert cli.doctor(None) == code
    assert all(problem in capsys.readouterr().out for problem in problems)


def test_a_closed_output_is_told_in_one_line(monkeypatch, capsys):
    """As `sglang-sm120 doctor >&-` has it: Python starts without a stdout, and ignores what is printed."""
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as end:
        cli.main(["doctor"])
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: standard output is closed: there is nowhere to print to\n"


def test_the_doctor_misses_the_plugin(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [])
    assert "the plugin entry point is missing" in next(cli._problems())


def counters(monkeypatch: pytest.MonkeyPatch, rank: int = 0) -> list[tuple[str, ...]]:
    """What is counted by this rank of a TP group whose server has metrics on."""
    counted: list[tuple[str, ...]] = []
    monkeypatch.setattr(metrics, "get_observability", lambda: SimpleNamespace(enable_metrics=True))
    monkeypatch.setattr(metrics, "get_parallel", lambda: SimpleNamespace(attn_tp_rank=rank))
    monkeypatch.setattr(metrics, "_planned", None)

    def metric(*name: str) -> SimpleNamespace:
        def labels(*values: str) -> SimpleNamespace:
            return SimpleNamespace(
                inc=lambda: counted.append((*name[:1], *values)), set=lambda n: counted.append((*values, n))
            )

        return SimpleNamespace(labels=labels)

    monkeypatch.setattr(metrics, "_counter", metric)
    monkeypatch.setattr(metrics, "_splits", metric)
    return counted


def test_a_step_counts_once_and_when_it_runs(monkeypatch):
    counted = counters(monkeypatch)
    metrics.note_plan(metrics.Plan("decode", "kernel", 47))
    metrics.note_plan(metrics.Plan("decode", "kernel", 47))
    assert counted == [], "upstream may prepare a step twice"
    step("decode")
    step("decode")  # one that another backend planned
    assert counted == [("attention_steps", "decode", "kernel"), ("decode", 47)]
    metrics.count_fallback("decode")
    assert counted[2:] == [("eager_fallbacks", "decode")]


def test_one_rank_of_a_group_counts(monkeypatch):
    counted = counters(monkeypatch, rank=1)
    metrics.note_plan(metrics.Plan("decode", "kernel", 47))
    step("decode")
    metrics.count_fallback("decode")
    assert counted == []


def test_prompts_and_servers_without_graphs_have_no_fallback(monkeypatch, caplog):
    assert fallback(monkeypatch, False, batch_size=2, mode="EXTEND") == []
    assert fallback(monkeypatch, False, batch_size=2, graphs=[]) == []
    assert caplog.records == []


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_of_a_group_says_what_it_chose(monkeypatch, caplog, rank):
    monkeypatch.setattr(report, "get_parallel", lambda: SimpleNamespace(tp_rank=rank))
    monkeypatch.setattr(report, "facts", lambda _: {"GPU": "mock"})
    with caplog.at_level("INFO"):
        report.log_ready(None, None)
    assert caplog.messages == ["sm120: GPU mock"] * (rank == 0)

"""What a server starts with, by upstream's own resolution of its flags, on a machine with a mocked GPU."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import patch

import pair
import pytest
import torch
from sglang.srt.arg_groups import speculative_hook
from sglang.srt.arg_groups.overrides import attention_backends_of, model_config_of, resolved_view
from sglang.srt.platforms import current_platform
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import prepare_server_args
from sglang_sm120 import ops
from sglang_sm120.attention import select

OURS = ("sm120_mla", "sm120_mla")
STOCK = ("triton", "triton")
EAGLE = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(pair.TARGET))
DFLASH = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(pair.DRAFTER))
DSPARK = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(pair.DRAFTER))
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")


def spelled(words: tuple[str, ...]) -> str:
    return " ".join(words).replace(str(pair.PAIR), "")


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch):
    """Resolves flags as a server with the pair's target does, on a GPU that is there by mock only."""
    load_plugins()
    # In the GPU's place the CPU engine has plugged itself into upstream's speculation.
    monkeypatch.setattr(speculative_hook, "current_platform", current_platform)
    with override_platform(is_cuda=True, has_flashinfer=True), patch.dict(os.environ):  # some flags set variables
        yield _starter(monkeypatch)


def _starter(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    def start(*flags: str, capability: tuple[int, int] = (12, 0), problem: str | None = None) -> tuple[str, str]:
        gpu = SimpleNamespace(name="mock", major=capability[0], minor=capability[1], total_memory=96 << 30)
        mocks = {
            "is_available": lambda: True, "device_count": lambda: 8, "get_device_capability": lambda *_: capability,
            "get_device_name": lambda *_: "mock", "get_device_properties": lambda *_: gpu,
            "mem_get_info": lambda *_: (90 << 30, 96 << 30),
        }  # fmt: skip
        for name, mock in mocks.items():
            monkeypatch.setattr(torch.cuda, name, mock)
        monkeypatch.setattr(ops, "library_problem", lambda _: problem)
        monkeypatch.setattr(select, "prefills_with_full_heads", lambda: True)
        major = capability[0]
        facts = {"is_sm90": 9, "is_sm100": 10, "is_sm120": 12, "is_hopper_with_cuda_12_3": 9}
        with override_platform(**{fact: major == its for fact, its in facts.items()}, is_blackwell=major in (10, 12)):
            args = prepare_server_args(["--model-path", str(pair.TARGET), "--device", "cuda", *flags])
            args.resolve_once()
        start.args = args
        return attention_backends_of(resolved_view(args))

    return start


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        ((), OURS),
        (("--attention-backend", "triton"), STOCK),
        (("--attention-backend", "flashinfer"), ("flashinfer", "flashinfer")),
        (("--prefill-attention-backend", "flashinfer"), ("flashinfer", "sm120_mla")),
        (("--decode-attention-backend", "triton"), ("sm120_mla", "triton")),
        (("--kv-cache-dtype", "fp8_e4m3", "--page-size", "64"), OURS),
        (DFLASH, OURS),
        (EAGLE, STOCK),
        ((*EAGLE, "--speculative-draft-attention-backend", "triton"), OURS),
        (DSPARK, STOCK),
        (NGRAM, STOCK),
        (("--kv-cache-dtype", "fp8_e5m2"), STOCK),
        (("--dtype", "float16"), STOCK),
        (("--dcp-size", "2", "--tp-size", "2"), STOCK),
        (("--enable-prefill-cp", "--cp-strategy", "zigzag", "--attn-cp-size", "2", "--tp-size", "2"), STOCK),
        (("--enable-unified-memory",), STOCK),
        (("--enable-deterministic-inference",), STOCK),
        (("--rl-on-policy-target", "fsdp"), STOCK),
        (("--cuda-graph-backend-prefill", "full"), STOCK),
        (("--enable-two-batch-overlap", "--moe-a2a-backend", "deepep", "--tp-size", "2"), STOCK),
    ],
    ids=spelled,
)
def test_what_sm_120_gets_by_itself(start, flags, chosen):
    """What is asked for wins; what we would refuse is left to upstream's choice instead of ending the start."""
    assert start(*flags) == chosen


@pytest.mark.parametrize(
    ("capability", "chosen"),
    [((12, 1), "sm120_mla"), ((9, 0), "fa3"), ((10, 0), "trtllm_mla"), ((8, 0), "triton"), ((8, 9), "triton")],
)
def test_what_other_gpus_get_by_themselves(start, capability, chosen):
    assert start(capability=capability)[1] == chosen


def test_a_library_that_lacks_this_gpu_is_left_alone_and_refused_if_asked_for(start):
    problem = "the kernels are not built for this GPU, sm_120"
    assert start(problem=problem) == STOCK
    with pytest.raises(ValueError, match=problem):
        start("--attention-backend", "sm120_mla", problem=problem)


@pytest.mark.parametrize(
    "flags",
    [
        ("--dcp-size", "2", "--tp-size", "2"),
        ("--attn-cp-size", "2", "--tp-size", "2", "--enable-prefill-cp", "--cp-strategy", "zigzag"),
        ("--enable-unified-memory",),
        ("--enable-deterministic-inference",),
        ("--kv-cache-dtype", "fp8_e5m2"),
        ("--kv-cache-dtype", "mxfp8"),
        ("--dtype", "float16"),
        ("--flashinfer-mla-disable-ragged",),
        ("--enable-two-batch-overlap", "--moe-a2a-backend", "deepep", "--tp-size", "2"),
        ("--enable-pdmux", "--chunked-prefill-size", "-1", "--disable-overlap-schedule"),
        ("--cuda-graph-backend-prefill", "full"),
        EAGLE,
        ("--speculative-algorithm", "NEXTN"),
        ("--speculative-algorithm", "STANDALONE", *EAGLE[2:]),
        DSPARK,
        NGRAM,
    ],
    ids=spelled,
)
def test_what_is_refused_when_asked_for_names_its_flag(start, flags):
    with pytest.raises(ValueError, match=f"--attention-backend sm120_mla cannot serve this: .*{flags[0]}"):
        start("--attention-backend", "sm120_mla", *flags)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_asked_for_in_one_phase_only_is_held_to_the_same(start, phase):
    with pytest.raises(ValueError, match="--enable-unified-memory"):
        start(f"--{phase}-attention-backend", "sm120_mla", "--enable-unified-memory")


@pytest.mark.parametrize("target", ["triton", "sm120_mla"])
@pytest.mark.parametrize("drafting", [EAGLE, DFLASH], ids=["EAGLE", "DFLASH"])
def test_a_draft_on_our_backend_is_refused(start, target, drafting):
    with pytest.raises(ValueError, match="--speculative-draft-attention-backend sm120_mla: it serves targets only"):
        start("--attention-backend", target, *drafting, "--speculative-draft-attention-backend", "sm120_mla")


@pytest.mark.parametrize(
    "flag", ["--cuda-graph-backend-prefill=full", '--cuda-graph-config={"prefill": {"backend": "full"}}']
)
def test_the_ready_line_says_why_not_ours(start, flag):
    """Whichever way the graphs were asked for, and in the scheduler's process: rules read what became of the flags."""
    assert start(flag) == STOCK
    given = pickle.loads(pickle.dumps(start.args))
    assert "--cuda-graph-backend-prefill full" in select.reason(given, model_config_of(given), "triton")

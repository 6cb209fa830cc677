"""The verify kernel's own sources on a CPU, in random schedules, against float64: layouts, barriers and their phases.

`emulation/` stands in for the instructions and the hardware. What it cannot show: any order of memory operations weaker
than the program's, registers, time.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import bundles
import numpy as np
import pytest
import torch
from sglang_sm120 import ops

from tools import kernels

EMULATION = Path(__file__).with_name("emulation")
NUM_SMS = 4
# Cut among all blocks: partial outputs, and their merge.
SPLIT = bundles.BundleCase("split", 30, 8, (3,), (1000,), tree=False)
# What goes wrong, and the text of which source is replaced by what.
# fmt: off
FAULTS = {
    "a stage is copied before its values were used": (
        "loader.cuh", "if (!stage_free) ptx::mbarrier_wait(bars.done(stage.slot), stage.parity ^ 1);", ""
    ),
    "a stage is taken to be free without a look": (
        "loader.cuh", "ptx::mbarrier_test(bars.done(stage.slot), stage.parity ^ 1)", "true"
    ),
    "partials are overwritten before they were read": (
        "score.cuh",
        "if (__builtin_expect(!free, 0)) ptx::mbarrier_wait(bars.consumed(buffer.slot), buffer.parity ^ 1);",
        "",
    ),
    "partials are taken to be read without a look": (
        "score.cuh", "ptx::mbarrier_test(bars.consumed(buffer.slot), buffer.parity ^ 1)", "true"
    ),
    "keys are read before they have landed": (
        "score.cuh",
        "if (__builtin_expect(!__all_sync(~0u, landed), 0)) ptx::mbarrier_wait(bars.landed(ring.slot), ring.parity);",
        "",
    ),
    "keys are taken to have landed without a look": (
        "score.cuh", "ptx::mbarrier_test(bars.landed(ring.slot), ring.parity)", "true"
    ),
    "partials are read before they are there": (
        "softmax.cuh", "if (!published) ptx::mbarrier_wait(bars.published(partials.slot), partials.parity);", ""
    ),
    "partials are taken to be there without a look": (
        "softmax.cuh", "ptx::mbarrier_test(bars.published(partials.slot), partials.parity)", "true"
    ),
    "probabilities are read before they are there": (
        "value.cuh",
        "    ptx::barrier_sync(kValueBarrier, kValueThreads);\n    const int again = softmax.rises(buffer);",
        "    const int again = softmax.rises(buffer);",
    ),
    "the flag of rising references is read before the barrier": (
        "value.cuh",
        "    ptx::barrier_sync(kValueBarrier, kValueThreads);\n    const int again = softmax.rises(buffer);",
        "    const int again = softmax.rises(buffer);\n    ptx::barrier_sync(kValueBarrier, kValueThreads);",
    ),
    "probabilities have one place instead of two": ("value.cuh", "++tile, buffer ^= 1", "++tile"),
    "partial outputs are half without an exponent": ("value.cuh", "share_exponent(peak * scale)", "127 + 14"),
}
# fmt: on


def _cut(text: str, start: str) -> str:
    """`text` without what follows `start`, which launches kernels and ends the namespace."""
    assert text.count(start) == 1, start
    return text[: text.index(start)] + "}  // namespace sm120::mla\n"


def _build(folder: Path, fault: str = "") -> ctypes.CDLL:
    """The emulated library, built in `folder`; with one of FAULTS, if it is named."""
    sources = kernels.SOURCES / "mla_verify"
    for source in (
        kernels.SOURCES / "include" / "sm120_mla.h",
        sources / "launch.cu",
        *sources.glob("*.h"),
        *sources.glob("*.cuh"),
    ):
        shutil.copy(source, folder)
    if fault:
        name, right, wrong = FAULTS[fault]
        text = (folder / name).read_text()
        assert right in text, (fault, "its place has changed")
        (folder / name).write_text(text.replace(right, wrong))
    kernel = (folder / "kernel.cuh").read_text().replace("extern __shared__ __align__(128) char smem[];", "")
    (folder / "kernel.cuh").write_text(_cut(kernel, "template <typename Kv, int RowGroups>\nint launch("))
    merge = (sources / "merge.cu").read_text().replace("__shared__", "static")
    (folder / "merge.cuh").write_text(_cut(merge, "int launch_merge("))
    # nvcc knows where its headers are, and hands C++ to the host's compiler.
    flags = ["-std=c++17", "-O1", "-Xcompiler", "-fPIC,-w", "-shared", "-D__forceinline__=inline"]
    library = folder / "libemulated.so"
    command = [kernels.find_nvcc(), *flags, f"-I{EMULATION}", f"-I{folder}", EMULATION / "emulation.cpp", "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def _launch(
    library: ctypes.CDLL, case: bundles.BundleCase, data: dict[str, np.ndarray], seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Runs a case with poisoned outputs and workspace; returns float32 out and lse."""
    data = {name: np.ascontiguousarray(array) for name, array in data.items()}
    rows, batch = sum(case.q_lens), len(case.q_lens)
    library.sm120_mla_workspace_bytes.restype = ctypes.c_size_t
    out = np.full((rows, case.heads, 512), 0xFFFF, dtype=np.uint16)
    lse = np.full((rows, case.heads), np.nan, dtype=np.float32)
    workspace = np.full(library.sm120_mla_workspace_bytes(NUM_SMS, batch) + 256, 0xFF, dtype=np.uint8)
    uniform = len(set(case.q_lens)) == 1
    at = {name: array.ctypes.data for name, array in data.items()}
    params = ops._Params(
        q=at["q"], kv=at["kv"], req_to_token=at["req_to_token"], req_pool_indices=at["req_pool_indices"],
        kv_lens=at["kv_lens"], qo_indptr=None if uniform else at["qo_indptr"], tree_mask=at["tree_mask"],
        out=out.ctypes.data, lse=lse.ctypes.data, workspace=-(-workspace.ctypes.data // 256) * 256,
        kv_stride_bytes=576 * (1 if case.fp8 else 2), req_to_token_stride=data["req_to_token"].shape[1],
        req_pool_indices_stride=1, kv_lens_stride=1, batch=batch, q_len=case.q_lens[0] if uniform else 0, total_q=rows,
        heads=case.heads, mask_words=data["tree_mask"].shape[1], kv_is_fp8=case.fp8, num_sms=NUM_SMS, early_launch=0,
        sm_scale=case.sm_scale, kv_scale=float(data["kv_scale"][0]), logit_cap=case.logit_cap,
    )  # fmt: skip
    library.set_emulation_seed(seed)
    assert library.sm120_mla_verify(ctypes.byref(params), None) == 0
    return _floats(out), lse


def _floats(bf16: np.ndarray) -> np.ndarray:
    return (bf16.astype(np.uint32) << 16).view(np.float32)


def _times_power(bf16: np.ndarray, power: int) -> np.ndarray:
    """bf16 bits of 2**power times as much, exact."""
    return (np.ldexp(_floats(bf16), power).view(np.uint32) >> 16).astype(np.uint16)


def _relative_error(out: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(out - want) / np.linalg.norm(want))


def _check(library: ctypes.CDLL, case: bundles.BundleCase, seed: int) -> None:
    """Raises AssertionError where the answers are off."""
    data = bundles.make(case)
    out, lse = _launch(library, case, data, seed)
    assert np.isfinite(out).all()
    assert _relative_error(out, data["out"]) < bundles.MAX_RELATIVE_ERROR
    finite = np.isfinite(data["lse"])
    assert np.array_equal(np.isneginf(lse), ~finite)
    assert np.abs(lse[finite] - data["lse"][finite]).max(initial=0) < bundles.MAX_LSE_ERROR


def _check_magnitude(library: ctypes.CDLL, power: int) -> None:
    """Latents 2**power times as large, queries as much smaller: outputs are 2**power times as large, bit for bit."""
    data = bundles.make(SPLIT)
    scaled = data | {"q": _times_power(data["q"], -power), "kv": _times_power(data["kv"], power)}
    (want, want_lse), (out, lse) = (_launch(library, SPLIT, each, seed=0) for each in (data, scaled))
    assert np.array_equal(lse, want_lse)
    assert np.array_equal(out, np.ldexp(want, power))


def _pytorch_out(case: bundles.BundleCase, data: dict[str, np.ndarray]) -> np.ndarray:
    """PyTorch's own attention of a case without tree or soft cap: products, softmax and sums in bf16."""
    q, kv = (torch.from_numpy(data[name]).view(torch.bfloat16) for name in ("q", "kv"))
    outs = []
    for b, (new, length) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        tokens = kv[torch.from_numpy(data["req_to_token"][data["req_pool_indices"][b], :length]).long()]
        logits = torch.einsum("qhd,kd->hqk", q[data["qo_indptr"][b] : data["qo_indptr"][b + 1]], tokens) * case.sm_scale
        unseen = torch.ones(new, length, dtype=torch.bool).triu(length - new + 1)
        weights = torch.softmax(logits.masked_fill(unseen, -torch.inf), dim=-1)
        outs.append(torch.einsum("hqk,kd->qhd", weights, tokens[:, :512]))
    return torch.cat(outs).float().numpy()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("nvcc") is None or platform.machine() != "x86_64":
        pytest.skip("needs nvcc's headers, and x86-64 to switch stacks")
    return _build(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("case", [*bundles.CASES, *bundles.INSTANCES], ids=lambda c: c.name)
def test_right_in_random_schedules(library: ctypes.CDLL, case: bundles.BundleCase) -> None:
    for seed in range(2):
        _check(library, case, seed)


@pytest.mark.parametrize("case", bundles.INSTANCES, ids=lambda c: c.name)
def test_report_has_the_shared_memory_of_each_instance(library: ctypes.CDLL, case: bundles.BundleCase) -> None:
    _launch(library, case, bundles.make(case), seed=0)
    used = ctypes.c_int.in_dll(library, "shared_bytes").value
    assert used == kernels.shared_bytes(case.fp8, row_groups=case.q_lens[0])


@pytest.mark.parametrize("power", [-90, -30, 30, 90])
def test_latents_of_any_magnitude(library: ctypes.CDLL, power: int) -> None:
    _check_magnitude(library, power)


def test_as_exact_as_pytorch(library: ctypes.CDLL) -> None:
    data = bundles.make(SPLIT)
    out, _ = _launch(library, SPLIT, data, seed=0)
    own, pytorch = (_relative_error(each, data["out"]) for each in (out, _pytorch_out(SPLIT, data)))
    assert own <= pytorch


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_is_found(library: ctypes.CDLL, tmp_path: Path, fault: str) -> None:
    """In a process of its own, which a deadlock ends."""
    tried = library if not fault else _build(tmp_path, fault)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, __file__, tried._name], env=environment, capture_output=True, timeout=120)
    assert (ended.returncode != 0) == bool(fault), ended.stderr.decode()


if __name__ == "__main__":
    tried = ctypes.CDLL(sys.argv[1])
    for instance in bundles.INSTANCES:
        _check(tried, instance, seed=0)
    _check_magnitude(tried, 30)

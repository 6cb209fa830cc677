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
from sglang_sm120 import ops

from tools import kernels

EMULATION = Path(__file__).with_name("emulation")
NUM_SMS = 4
# Every instance of the kernel: 8 to 48 rows, both KV types; several requests to a block, odd numbers of tiles.
INSTANCES = [
    bundles.BundleCase(f"{8 * q}_rows{'_fp8' if fp8 else ''}", 20 + q, 8, (q, q, q), (300, q, 133), fp8=fp8)
    for q in range(1, 7)
    for fp8 in (False, True)
]
FAULTS = {
    "a stage is copied before its values were used": "ptx::mbarrier_wait(bars.done(ring.slot), ring.parity ^ 1);",
    "partials are overwritten before they were read": (
        "ptx::mbarrier_wait(bars.consumed(buffer.slot), buffer.parity ^ 1);"
    ),
    "partials are read before they are there": "ptx::mbarrier_wait(bars.published(partials.slot), partials.parity);",
    "keys are read before they have landed": "ptx::mbarrier_wait(bars.landed(ring.slot), ring.parity);",
}


def _cut(text: str, start: str) -> str:
    """`text` without what follows `start`, which launches kernels and ends the namespace."""
    assert text.count(start) == 1, start
    return text[: text.index(start)] + "}  // namespace sm120::mla\n"


def _build(folder: Path, fault: str = "") -> ctypes.CDLL:
    """The emulated library, built in `folder`; without the statement `fault`, if one is given."""
    for header in kernels.SOURCES.glob("*/*.h"):
        shutil.copy(header, folder)
    for name in ("work.cuh", "launch.cu"):
        shutil.copy(kernels.SOURCES / "mla_verify" / name, folder)
    kernel = (kernels.SOURCES / "mla_verify" / "kernel.cuh").read_text()
    assert fault in kernel
    kernel = kernel.replace(fault, "", 1) if fault else kernel
    kernel = kernel.replace("extern __shared__ __align__(128) char smem[];", "")
    (folder / "kernel.cuh").write_text(_cut(kernel, "template <typename Kv, int RowGroups>\nint launch("))
    merge = (kernels.SOURCES / "mla_verify" / "merge.cu").read_text().replace("__shared__", "static")
    (folder / "merge.cuh").write_text(_cut(merge, "int launch_merge("))
    # nvcc knows where its headers are, and hands C++ to the host's compiler.
    flags = ["-std=c++17", "-O1", "-Xcompiler", "-fPIC,-w", "-shared", "-D__forceinline__=inline"]
    library = folder / "libemulated.so"
    command = [kernels.find_nvcc(), *flags, f"-I{EMULATION}", f"-I{folder}", EMULATION / "emulation.cpp", "-o", library]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(library))


def _run(library: ctypes.CDLL, case: bundles.BundleCase, seed: int) -> None:
    """Runs a case with poisoned outputs and workspace; raises AssertionError where they are off."""
    data = {name: np.ascontiguousarray(array) for name, array in bundles.make(case).items()}
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
    got, want = (out.astype(np.uint32) << 16).view(np.float32), data["out"]
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) < bundles.MAX_RELATIVE_ERROR * np.linalg.norm(want)
    finite = np.isfinite(data["lse"])
    assert np.array_equal(np.isneginf(lse), ~finite)
    assert np.abs(lse[finite] - data["lse"][finite]).max(initial=0) < bundles.MAX_LSE_ERROR


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("nvcc") is None or platform.machine() != "x86_64":
        pytest.skip("needs nvcc's headers, and x86-64 to switch stacks")
    return _build(tmp_path_factory.mktemp("emulated"))


@pytest.mark.parametrize("case", [*bundles.CASES, *INSTANCES], ids=lambda c: c.name)
def test_right_in_random_schedules(library: ctypes.CDLL, case: bundles.BundleCase) -> None:
    for seed in range(2):
        _run(library, case, seed)


@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_missing_wait_is_found(library: ctypes.CDLL, tmp_path: Path, fault: str) -> None:
    """In a process of its own, which a deadlock ends."""
    tried = library if not fault else _build(tmp_path, FAULTS[fault])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, __file__, tried._name], env=environment, capture_output=True, timeout=120)
    assert (ended.returncode != 0) == bool(fault), ended.stderr.decode()


if __name__ == "__main__":
    for instance in INSTANCES:
        _run(ctypes.CDLL(sys.argv[1]), instance, seed=0)

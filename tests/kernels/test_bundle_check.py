"""The C++ reader of the reference bundles sees what Python wrote; with a GPU it runs the kernels on them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import bundles
import numpy as np
import pytest
import torch
from sglang_sm120 import ops

from tools import kernels

SOURCE = Path(__file__).with_name("bundle_check.cpp")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ops.LIBRARY_PATH.exists() or shutil.which("nvcc") is None:
        pytest.skip("needs nvcc and built kernels: run `make kernels`")
    path = tmp_path_factory.mktemp("bin") / "bundle_check"
    folder, name = ops.LIBRARY_PATH.parent, ops.LIBRARY_PATH.name
    # The toolkit's library folder: pip's nvcc has it beside bin, the system's also as lib64.
    toolkit = Path(kernels.find_nvcc()).resolve().parent.parent
    command = [kernels.find_nvcc(), "-std=c++17", f"-I{kernels.SOURCES / 'include'}", f"-L{toolkit / 'lib'}"]
    command += [str(SOURCE), "-o", str(path), f"-L{folder}", f"-l:{name}", f"-Xlinker=-rpath,{folder}"]
    subprocess.run(command, check=True)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    bundles.write(folder)
    return [folder / f"{case.name}.safetensors" for case in bundles.CASES]


def test_cpp_reads_what_python_wrote(program: Path, files: list[Path]) -> None:
    listed = subprocess.run([program, "list", *files], check=True, capture_output=True, text=True).stdout
    expected = []
    for case, file in zip(bundles.CASES, files, strict=True):
        expected.append(str(file))
        for name, array in sorted(bundles.make(case).items()):
            dtype = {"f": "F", "i": "I", "u": "U"}[array.dtype.kind] + str(8 * array.dtype.itemsize)
            total = np.frombuffer(array.tobytes(), dtype=np.uint8).sum(dtype=np.uint64)
            expected.append(" ".join(map(str, [name, dtype, *array.shape, "=", total])))
    assert listed.splitlines() == expected


def test_a_file_that_is_no_bundle_is_named(program: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_bytes(b"12345678901234567890")
    result = subprocess.run([program, "list", wrong], check=False, capture_output=True, text=True)
    assert result.returncode == 2 and f"error: {wrong}" in result.stderr


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_kernels_are_right_from_cpp(program: Path, files: list[Path]) -> None:
    result = subprocess.run([program, "run", *files], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr

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


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device for tests (docs/CONTRIBUTING.md)")


def _compile(library: Path, folder: Path) -> Path:
    """The checker, linked to a kernel library."""
    # The toolkit's library folder: pip's nvcc has it beside bin, the system's also as lib64.
    toolkit = Path(kernels.find_nvcc()).resolve().parent.parent
    command = [kernels.find_nvcc(), "-std=c++17", f"-I{kernels.SOURCES / 'include'}", f"-L{toolkit / 'lib'}"]
    command += [str(SOURCE), "-o", str(folder / "bundle_check")]
    command += [f"-L{library.parent}", f"-l:{library.name}", f"-Xlinker=-rpath,{library.parent}"]
    subprocess.run(command, check=True)
    return folder / "bundle_check"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not ops.LIBRARY_PATH.exists() or shutil.which("nvcc") is None:
        pytest.skip("needs nvcc and built kernels: run `make kernels`")
    return _compile(ops.LIBRARY_PATH, tmp_path_factory.mktemp("bin"))


@pytest.fixture(scope="module")
def program_for_racecheck(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With kernels whose every lane arrives at mbarriers and waits at them: racecheck follows no others."""
    folder = tmp_path_factory.mktemp("bin_racecheck")
    sources = Path(shutil.copytree(kernels.SOURCES, folder / "racecheck"))
    capability = "sm_{}{}".format(*torch.cuda.get_device_capability())
    archs = [arch for arch in kernels.ALL_ARCHS if arch.rstrip("a") == capability]
    return _compile(kernels.build(archs, folder, sources, f"{kernels.FLAGS} -DSM120_RACECHECK"), folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return bundles.write(tmp_path_factory.mktemp("bundles"))


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


@NO_GPU
def test_kernels_are_right_from_cpp(program: Path, files: list[Path]) -> None:
    result = subprocess.run([program, "run", *files], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@NO_GPU
@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer (CUDA toolkit) on PATH")
@pytest.mark.parametrize("tool", ["memcheck", "synccheck", "racecheck"])
def test_a_sanitizer_finds_nothing(
    tool: str, files: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    checker = request.getfixturevalue("program_for_racecheck" if tool == "racecheck" else "program")
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "3", checker, "run"]
    command += [*files, *bundles.write(tmp_path, bundles.INSTANCES)]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    print(result.stdout[-300:])
    assert result.returncode == 0, result.stdout[:3000] + result.stderr

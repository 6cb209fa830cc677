"""What the compiler says of the kernels, with no GPU: they fit sm_120's shared memory and spill nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tools import kernels

ARCHS = kernels.DEFAULT_ARCHS  # what `make install` has compiled already: here it only links


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on this machine")
    return kernels.build(ARCHS, tmp_path_factory.mktemp("lib"))


@pytest.fixture(scope="module")
def usages(library: Path) -> list[kernels.Usage]:
    return kernels.compiler_report(ARCHS)


def test_every_instance_fits_and_spills_nothing(usages: list[kernels.Usage]) -> None:
    verify = [u for u in usages if u.kernel.startswith("mla_verify")]
    assert len(verify) == 2 * 6 * len(ARCHS), "every KV type and row count, on every architecture"
    assert kernels.check(usages) == []


def test_check_names_what_is_wrong() -> None:
    fat = kernels.Usage("mla_verify bf16 48 rows", "sm_120a", shared_bytes=kernels.MAX_SHARED_BYTES + 1)
    spilled = kernels.Usage("merge_kernel", "sm_90", spill_bytes=8)
    problems = kernels.check([fat, spilled])
    assert "101377 B of shared memory" in problems[0] and "merge_kernel on sm_90: spills 8 B" in problems[1]


def test_disassembly_has_the_instructions_meant(library: Path) -> None:
    if kernels.find_cuobjdump() is None:
        pytest.skip("no cuobjdump: pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm")
    mixes = {
        name: mix for name, mix in kernels.disassembly(library, "sm_120a").items() if name.startswith("mla_verify")
    }
    assert len(mixes) == 2 * 6
    for kernel, mix in mixes.items():
        assert mix["HMMA"] and mix["LDGSTS"] and mix["LDSM"], (kernel, "mma, asynchronous copies and ldmatrix")
        assert not mix["LDL"] and not mix["STL"], (kernel, "local memory")
        assert not mix["HGMMA"] and not mix["UTCMMA"], (kernel, "instructions that sm_120 lacks")


def test_host_and_python_agree_on_shared_memory(usages: list[kernels.Usage]) -> None:
    largest = max(u.shared_bytes for u in usages)
    assert largest <= kernels.MAX_SHARED_BYTES
    assert min(u.shared_bytes for u in usages if u.kernel.startswith("mla_verify")) > 102_400 // 2, (
        "one block a multiprocessor"
    )


def test_unknown_architecture_is_one_clear_error() -> None:
    with pytest.raises(kernels.KernelError, match="unknown architecture 'sm_75'"):
        kernels._gencode("sm_75")


NVCC = """#!/bin/sh
command=$*
while [ $# -gt 0 ]; do
  case $1 in -o) out=$2 ;; -MF) rules=$2 ;; esac
  shift
done
mkdir busy || exit 1  # two at once
echo "$command" > $out
if [ $rules ]; then echo "$out:" > $rules; fi
sleep 0.1
rmdir busy
"""


@pytest.fixture
def toy_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """`kernels.build` for one architecture, of one source and by a compiler that writes down how it was called."""
    odd = tmp_path / "a $place of 'ours'"
    nvcc = odd / "cuda" / "bin" / "nvcc"
    sources = odd / "sources"
    for folder in (nvcc.parent, sources):
        folder.mkdir(parents=True)
    nvcc.write_text(NVCC)
    nvcc.chmod(0o755)
    (sources / "a.cu").write_text("// a\n")
    monkeypatch.setenv("CUDA_HOME", str(odd / "cuda"))
    monkeypatch.setattr(kernels, "BUILD", odd / "build")
    return lambda arch: kernels.build([arch], odd / "lib", sources)


def test_build_speaks_only_when_it_compiles(toy_build: Callable[[str], Path], capfd: pytest.CaptureFixture) -> None:
    library = toy_build("sm_90")
    assert library.exists() and "compiling for sm_90 (minutes the first time)" in capfd.readouterr().out
    assert toy_build("sm_90") == library
    assert capfd.readouterr().out == ""
    library.unlink()
    toy_build("sm_90")
    assert library.exists()


def test_the_library_is_for_the_gpus_of_the_last_build(toy_build: Callable[[str], Path]) -> None:
    for arch in ("sm_90", "sm_120a", "sm_90"):
        assert f"code={arch}" in toy_build(arch).read_text()


def test_builds_at_the_same_time_take_turns(toy_build: Callable[[str], Path]) -> None:
    with ThreadPoolExecutor() as pool:
        assert len(set(pool.map(toy_build, ["sm_90"] * 3))) == 1


@pytest.mark.usefixtures("toy_build")
def test_a_place_that_cannot_be_written_is_one_error(capsys: pytest.CaptureFixture) -> None:
    kernels.BUILD.touch()
    assert kernels.main(["build"]) == 2
    assert capsys.readouterr().err.startswith("error: [Errno")


def test_unknown_architecture_is_refused_first(toy_build: Callable[[str], Path], capfd: pytest.CaptureFixture) -> None:
    with pytest.raises(kernels.KernelError, match="unknown architecture 'sm_75'"):
        toy_build("sm_75")
    assert capfd.readouterr().out == "" and not kernels.BUILD.exists()


def test_the_ninja_of_this_python_comes_before_the_one_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two releases taking turns read each other's logs as stale and compile everything again."""
    own, other = (tmp_path / name / "ninja" for name in ("own", "other"))
    for ninja in (own, other):
        ninja.parent.mkdir()
        ninja.touch(mode=0o755)
    monkeypatch.setattr(kernels.sysconfig, "get_path", lambda _: str(own.parent))
    monkeypatch.setenv("PATH", str(other.parent))
    assert kernels.find_ninja() == str(own)
    own.unlink()
    assert kernels.find_ninja() == str(other)
    other.unlink()
    with pytest.raises(kernels.KernelError, match="-m pip install ninja"):
        kernels.find_ninja()


def test_source_hash_follows_the_sources(tmp_path: Path) -> None:
    copy = tmp_path / "kernels"
    shutil.copytree(kernels.SOURCES, copy)
    assert kernels.source_hash(copy) == kernels.source_hash(), "the folder's place is no part of it"
    (copy / "include" / "ptx.cuh").write_text("// changed\n")
    assert kernels.source_hash(copy) != kernels.source_hash()

"""Where the build looks for nvcc, and what it says where there is none."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from tools import kernels


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without any nvcc; returns a function that installs one in a folder."""
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    wheels = SimpleNamespace(submodule_search_locations=[str(tmp_path / "nvidia")])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: wheels if name == "nvidia" else None)

    def install(folder: str) -> str:
        nvcc = tmp_path / folder / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text("#!/bin/sh\n")
        nvcc.chmod(0o755)
        return str(nvcc)

    return install


def test_none_says_how_to_get_one(bare):
    with pytest.raises(kernels.KernelError, match=r"CUDA_HOME.*pip install nvidia-cuda-nvcc"):
        kernels.find_nvcc()


def test_pip_wheel_then_path_then_cuda_home(bare, monkeypatch, tmp_path):
    in_wheel = bare("nvidia/cu13/bin")
    assert kernels.find_nvcc() == in_wheel
    on_path = bare("path")
    assert kernels.find_nvcc() == on_path
    in_home = bare("cuda/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert kernels.find_nvcc() == in_home


def test_a_wrong_cuda_home_is_not_passed_over(bare, monkeypatch, tmp_path):
    bare("path")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(kernels.KernelError):
        kernels.find_nvcc()


def test_archs_of_the_environment_reach_kernels_and_wheel(monkeypatch):
    from tools import fork

    monkeypatch.setenv("ARCHS", "sm_80,sm_89")
    assert kernels.wanted_archs() == ["sm_80", "sm_89"]
    assert fork._parser().parse_args(["build"]).archs == ["sm_80", "sm_89"]
    monkeypatch.delenv("ARCHS")
    assert kernels.wanted_archs() == list(kernels.DEFAULT_ARCHS)

"""What the GPU's benches say where they cannot run, in a .venv of the CPU's requirements, say."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from tools import bench_e2e, kernel_bench

BENCHES = {
    "bench": lambda out: kernel_bench.main(["bench", "--out", str(out)]),
    "bench-e2e": lambda out: bench_e2e.main(["--model", "m", "--out", str(out)]),
}


@pytest.mark.parametrize("name", BENCHES)
def test_a_gpu_without_upstreams_packages_is_one_line_that_installs_them(name, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert BENCHES[name](tmp_path / "out") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert "`.venv/bin/python -m tools.fork install --all-requirements`" in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", BENCHES)
@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_no_gpu_is_one_line_that_says_whether_pytorch_could_see_one(name, cuda, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert BENCHES[name](tmp_path / "out") == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: no CUDA device here") and ("built without CUDA" in error) == (cuda is None)

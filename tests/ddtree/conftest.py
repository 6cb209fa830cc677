"""Paths and Triton's interpreter for the tests that need no server."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "overlay"))
sys.path.insert(0, str(ROOT))


@pytest.fixture(scope="session")
def triton_kernels():
    """`ddtree.kernels` and the device to run them on: the GPU, or the CPU by Triton's interpreter."""
    if torch.cuda.is_available():
        yield importlib.import_module("sglang_sm120.ddtree.kernels"), "cuda"
        return
    if "triton" in sys.modules:
        pytest.skip("triton was imported before its interpreter could be chosen; run tests/ddtree by itself")
    # Triton's own library functions pick the interpreter when they are imported; servers started later must not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        triton = pytest.importorskip("triton")
        kernels = importlib.import_module("sglang_sm120.ddtree.kernels")
    triton.knobs.runtime.interpret = True  # for this process alone
    yield kernels, "cpu"

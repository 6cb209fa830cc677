"""Runs kernel_cases.py in a process of its own: Triton's interpreter has to be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = Path(__file__).with_name("kernel_cases.py")


def test_the_triton_kernels_are_the_torch_functions():
    pytest.importorskip("triton")
    interpret = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", str(CASES), "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, env=os.environ | interpret, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout
    assert "4 passed" in result.stdout, result.stdout

"""Tools that need a GPU begin with this: where one is missing they end before anything is downloaded or measured."""

from __future__ import annotations

import importlib.util
import sys

import torch

from tools.gpu import MISSING


def found() -> bool:
    """Whether there is a CUDA device; says what to do if not."""
    if torch.cuda.is_available():
        return True
    build = "" if torch.version.cuda else f"; PyTorch {torch.__version__} is built without CUDA, PyPI's is with it"
    print(f"error: {MISSING}{build}", file=sys.stderr)
    return False


def can_serve() -> bool:
    """Whether upstream's packages for GPUs are here too; says what to install if not."""
    if not found():
        return False
    if importlib.util.find_spec("sgl_kernel"):
        return True
    print("error: only what the CPU needs is installed: `.venv/bin/python -m tools.fork install --all-requirements` "
          "brings upstream's packages for GPUs", file=sys.stderr)  # fmt: skip
    return False


if __name__ == "__main__":
    sys.exit(0 if found() else 2)

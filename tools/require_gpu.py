"""Tools that need a GPU begin with this: without a CUDA device they end before anything is downloaded or measured."""

from __future__ import annotations

import sys

import torch


def found() -> bool:
    """Whether there is a CUDA device; says what to do if not."""
    if torch.cuda.is_available():
        return True
    print("error: no CUDA device here: run this on the machine with the GPUs (`nvidia-smi` must list them; "
          "without a GPU: make demo, make serve-tiny)", file=sys.stderr)  # fmt: skip
    return False


if __name__ == "__main__":
    sys.exit(0 if found() else 2)

"""What upstream's expert-distribution recorder needs on the CPU engine: a CPU captures no graphs, and torch says so."""

from __future__ import annotations

import torch


def register() -> None:
    """Called on a CPU engine only: asking the CUDA driver that is not there would raise."""
    torch.cuda.is_current_stream_capturing = lambda: False

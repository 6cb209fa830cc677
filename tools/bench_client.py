"""Upstream's bench_serving, imported once for many calls: the import takes longer than a short measurement.

`bench_e2e` has this module loaded by a process that it forks for every call.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

# Upstream reads it for data from the network, which no bench here does.
if importlib.util.find_spec("datasets") is None:
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]

from sglang.benchmark import serving


def run(flags: Sequence[str], log: Path) -> None:
    """`python -m sglang.benchmark.serving FLAGS` in this process, its output added to `log`."""
    sys.argv = ["sglang.benchmark.serving", *flags]
    with log.open("a") as output, redirect_stdout(output), redirect_stderr(output):
        serving.cli_main()

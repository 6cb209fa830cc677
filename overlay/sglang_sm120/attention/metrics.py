"""Counters of the backend in SGLang's own Prometheus endpoint (`--enable-metrics`)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_observability

if TYPE_CHECKING:
    from prometheus_client import Counter


@lru_cache(maxsize=1)
def _steps() -> Counter:
    # Imported late: prometheus_client picks its storage once upstream has set PROMETHEUS_MULTIPROC_DIR.
    from prometheus_client import Counter

    return Counter("sm120:attention_steps", "Forward steps planned by sm120_mla", ["mode", "path"])


def count_step(mode: str, path: str) -> None:
    """Count one forward step of `mode` (decode, verify, extend, ...) served by `path` (kernel or reference)."""
    if get_observability().enable_metrics:
        _steps().labels(mode, path).inc()

"""Counters of the backend in SGLang's own Prometheus endpoint (`--enable-metrics`)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from sglang.srt.runtime_context import get_observability

if TYPE_CHECKING:
    from prometheus_client import Counter


@cache
def _counter(name: str, text: str, *labels: str) -> Counter:
    # Imported late: prometheus_client picks its storage once upstream has set PROMETHEUS_MULTIPROC_DIR.
    from prometheus_client import Counter

    return Counter(f"sm120:{name}", text, labels)


def count_step(mode: str, path: str) -> None:
    """Count one forward step of `mode` (decode, target_verify, extend, ...) served by `path` (kernel or reference)."""
    if get_observability().enable_metrics:
        _counter("attention_steps", "Forward steps planned by sm120_mla", "mode", "path").labels(mode, path).inc()


def count_fallback(mode: str) -> None:
    """Count one step of `mode` that ran eagerly although CUDA graphs are on."""
    if get_observability().enable_metrics:
        _counter("eager_fallbacks", "Steps that left their CUDA graph", "mode").labels(mode).inc()

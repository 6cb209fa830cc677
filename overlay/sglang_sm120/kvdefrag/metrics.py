"""Gauges and counters of defragmentation in SGLang's own Prometheus endpoint (`--enable-metrics`), from one rank."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import TYPE_CHECKING

from sglang_sm120.attention.metrics import reports

if TYPE_CHECKING:
    from sglang_sm120.kvdefrag.census import Census


@lru_cache(maxsize=1)
def _series() -> SimpleNamespace:
    # Imported late: prometheus_client picks its storage once upstream has set PROMETHEUS_MULTIPROC_DIR.
    from prometheus_client import Counter, Gauge

    def gauge(name: str, text: str) -> Gauge:
        return Gauge(f"sm120:kv_{name}", text, multiprocess_mode="mostrecent")

    return SimpleNamespace(
        contiguity=gauge("contiguity", "Contiguity of the running requests' KV, 0 to 1"),
        mean_run_length=gauge("mean_run_length", "Units of KV a run, over the running requests"),
        free_runs=gauge("free_runs", "Runs of free KV units"),
        largest_free_run=gauge("largest_free_run", "Units of the longest run of free KV"),
        partial_blocks=gauge("partial_blocks", "Aligned blocks of KV units that are partly used"),
        passes=Counter("sm120:kv_compaction_passes", "Passes of KV compaction that moved something"),
        units=Counter("sm120:kv_compaction_units", "KV units that passes of compaction moved"),
        seconds=Counter(
            "sm120:kv_compaction_seconds", "Host seconds in passes of KV compaction; the GPU goes on moving meanwhile"
        ),
    )


def publish(census: Census) -> None:
    """Set the gauges to a census."""
    if not reports():
        return
    series = _series()
    series.contiguity.set(census.total.contiguity)
    series.mean_run_length.set(census.total.mean_length)
    series.free_runs.set(census.free.runs)
    series.largest_free_run.set(census.largest_free_run)
    series.partial_blocks.set(census.partial_blocks)


def count_pass(units: int, seconds: float) -> None:
    """Count one pass that moved something."""
    if not reports():
        return
    series = _series()
    series.passes.inc()
    series.units.inc(units)
    series.seconds.inc(seconds)

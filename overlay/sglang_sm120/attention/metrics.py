"""Metrics of the backend in SGLang's own Prometheus endpoint (`--enable-metrics`). One rank of a TP group reports.

Accept length is upstream's gauge `sglang:spec_accept_length`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.runtime_context import get_observability, get_parallel
from sglang.srt.utils.device_timer import DeviceTimer

if TYPE_CHECKING:
    from prometheus_client import Counter, Gauge, Histogram

# From a small model's verify to stock Triton's at full context: factors of two.
VERIFY_BUCKETS_S = tuple(2.0**i / 1000 for i in range(12))


class Plan(NamedTuple):
    """A step that `sm120_mla` prepared: its mode, what computes it, into how many pieces a long context is cut."""

    mode: str
    path: str
    splits: int | None


# Upstream may prepare a step twice, so a step counts when it runs and not when it is prepared.
_planned: Plan | None = None


def note_plan(plan: Plan) -> None:
    """Remember the step that was prepared last; `observe_step` counts it."""
    global _planned
    _planned = plan


def observe_step(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ModelRunner.forward`: count the step, and time it where a target verifies.

    On a GPU two events bracket the launch, replayed graph or eager, and are read when a later step finds them done:
    nothing waits for the device.
    """
    global _planned
    if not reports():
        return original(runner, forward_batch, *args, **kwargs)
    verifies = forward_batch.forward_mode.is_target_verify() and not runner.is_draft_worker
    with _verify_timer(runner.device) if verifies else nullcontext():
        output = original(runner, forward_batch, *args, **kwargs)
    if _planned is not None:
        _count(_planned)
        _planned = None
    return output


def _count(plan: Plan) -> None:
    _counter("attention_steps", "Forward steps served by sm120_mla", "mode", "path").labels(plan.mode, plan.path).inc()
    if plan.splits is not None:
        _splits().labels(plan.mode).set(plan.splits)


def count_fallback(mode: str) -> None:
    """Count one step of `mode` that ran eagerly although CUDA graphs are on."""
    if reports():
        _counter("eager_fallbacks", "Steps that left their CUDA graph", "mode").labels(mode).inc()


def reports() -> bool:
    """Whether this process counts: of a tensor parallel group one rank does."""
    return get_observability().enable_metrics and get_parallel().attn_tp_rank == 0


def _verify_timer(device: str) -> AbstractContextManager[Any]:
    return _verify_seconds().time() if device == "cpu" else _device_timer().wrap({})


@cache
def _device_timer() -> DeviceTimer:
    return DeviceTimer(lambda t: _verify_seconds().observe(t))


# prometheus_client is imported late: it picks its storage once upstream has set PROMETHEUS_MULTIPROC_DIR.
@cache
def _counter(name: str, text: str, *labels: str) -> Counter:
    from prometheus_client import Counter

    return Counter(f"sm120:{name}", text, labels)


@cache
def _splits() -> Gauge:
    from prometheus_client import Gauge

    text = "Blocks among which the last step divides a long context"
    return Gauge("sm120:attention_splits", text, ["mode"], multiprocess_mode="mostrecent")


@cache
def _verify_seconds() -> Histogram:
    from prometheus_client import Histogram

    return Histogram("sm120:verify_seconds", "Time of a target's verify pass, all layers", buckets=VERIFY_BUCKETS_S)

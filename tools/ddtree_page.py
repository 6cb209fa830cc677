"""docs/bench/ddtree.{json,md,png} from what `tools.bench_ddtree run` left: the table, and the steps in its profiles."""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import math
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.markdown import number, table

MODES = ("none", "chain", "tree", "adaptive")
IS_GEMM = re.compile("gemm|nvjet|cutlass|gemv", re.IGNORECASE)
PARTS = ("period_us", "draft_forward_us", "target_forward_us", "draft_kv_us", "tree_us", "tree_in_graphs_us")
IS_SYNC = re.compile("Synchronize")
VERIFY_STEP = re.compile(r"step\[VERIFY bs=(\d+)")  # how upstream marks a step in a profile


@dataclass(frozen=True)
class Span:
    """A kernel or copy on the device, or a call of the CUDA runtime on the host; microseconds."""

    name: str
    begin: float
    end: float
    correlation: int


def read_trace(path: Path) -> tuple[list[Span], list[Span], list[int]]:
    """Device and runtime spans of a torch profile, by begin, and the batch sizes of its verify steps."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    device: list[Span] = []
    runtime: list[Span] = []
    batches = []
    for event in events:
        category = event.get("cat", "")
        if step := VERIFY_STEP.match(str(event.get("name"))):
            batches.append(int(step[1]))
        is_device = category in ("kernel", "gpu_memcpy", "gpu_memset")
        if is_device or category in ("cuda_runtime", "cuda_driver"):
            begin, correlation = event["ts"], event["args"].get("correlation", -1)
            span = Span(event["name"], begin, begin + event["dur"], correlation)
            (device if is_device else runtime).append(span)
    device.sort(key=lambda span: span.begin)
    runtime.sort(key=lambda span: span.begin)
    return device, runtime, batches


def steps(device: list[Span], runtime: list[Span]) -> list[dict[str, Any]]:
    """One entry a step that is whole in the profile: microseconds of each part, and what waited on the host.

    A step begins with the kernel that opens the window and holds two graphs, the drafter's and the target's. Forward
    passes are the graphs up to the LM head's product; all else on the device is the tree's, idle time apart, but for
    the end of the target's graph: the drafter's layers make KV of the committed tokens there, in a chain's step too.
    """
    launches = {span.correlation: span for span in runtime}
    is_graph = {span.correlation: "GraphLaunch" in span.name for span in runtime}
    opens = [i for i, span in enumerate(device) if span.name == "_open"]
    found = []
    for first, following in itertools.pairwise(opens):
        spans = device[first:following]
        graphs: dict[int, list[Span]] = {}
        for span in spans:
            if is_graph.get(span.correlation):
                graphs.setdefault(span.correlation, []).append(span)
        if len(graphs) != 2:
            continue
        draft, target = sorted(graphs.values(), key=lambda graph: graph[0].begin)
        forwards = [_until_lm_head(draft, "_build"), _until_lm_head(target, "_walk")]
        busy = sum(span.end - span.begin for span in spans)
        forward = [sum(span.end - span.begin for span in part) for part in forwards]
        outside = {id(span) for part in forwards for span in part}
        draft_kv = sum(span.end - span.begin for span in _after_last(target, "move_kv"))
        inside_graphs = [s for s in spans if is_graph.get(s.correlation) and id(s) not in outside]
        host = launches[device[first].correlation].begin, launches[target[0].correlation].end
        found.append(
            {
                "period_us": device[following].begin - device[first].begin,
                "draft_forward_us": forward[0],
                "target_forward_us": forward[1],
                "draft_kv_us": draft_kv,
                "tree_us": busy - sum(forward) - draft_kv,
                "tree_in_graphs_us": sum(span.end - span.begin for span in inside_graphs) - draft_kv,
                "host_waits": sum(bool(IS_SYNC.search(span.name)) for span in _between(runtime, *host)),
                "names": _totals([span for span in spans if id(span) not in outside]),
            }
        )
    return found


def _until_lm_head(graph: list[Span], marker: str) -> list[Span]:
    """The spans up to the last matrix product before the kernel `marker`."""
    end = next(i for i, span in enumerate(graph) if span.name == marker)
    last = max(i for i in range(end) if IS_GEMM.search(graph[i].name))
    return graph[: last + 1]


def _after_last(graph: list[Span], marker: str) -> list[Span]:
    """The spans after the last kernel with `marker` in its name."""
    return graph[1 + max(i for i, span in enumerate(graph) if marker in span.name) :]


def _between(spans: list[Span], begin: float, end: float) -> list[Span]:
    at = bisect.bisect_left(spans, begin, key=lambda span: span.begin)
    return [span for span in spans[at:] if span.begin < end] if begin <= end else []


def _totals(spans: list[Span]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for span in spans:
        totals[span.name[:60]] = totals.get(span.name[:60], 0.0) + span.end - span.begin
    return totals


def profile_row(path: Path) -> dict[str, Any]:
    """Medians over the steps of a profile."""
    device, runtime, batches = read_trace(path)
    found = steps(device, runtime)
    names = {name for step in found for name in step["names"]}
    row: dict[str, Any] = {"bs": statistics.mode(batches), "steps": len(found)}
    for key in PARTS:
        row[key] = round(statistics.median(step[key] for step in found), 1)
    row["host_waits"] = max(step["host_waits"] for step in found)
    medians = {name: statistics.median(step["names"].get(name, 0.0) for step in found) for name in names}
    row["kernels_us"] = {name: round(value, 1) for name, value in sorted(medians.items(), key=lambda item: -item[1])}
    return row


def render(results: Path, docs: Path) -> None:
    """Write the page."""
    page = json.loads((results / "server-run.json").read_text())
    page["profiles"] = [profile_row(path) for path in sorted(results.glob("trace-*.json.gz"))]
    (docs / "ddtree.json").write_text(json.dumps(page, indent=1) + "\n")
    (docs / "ddtree.md").write_text(_markdown(page))
    _plot(page, docs / "ddtree.png")


def _markdown(page: dict[str, Any]) -> str:
    lines = [
        "# DDTREE on a GPU",
        "",
        f"One {page['gpu']} (not sm_120), torch {page['torch']}, kernel sources {page['kernel_hash'][:12]}.",
        f"The trained pair, grown to the width of a TP-8 rank (tools/grow_pair.py): {page['layers']} layers, hidden",
        "2048, 8 heads, latent 512 + 64, MoE; bf16, page size 1, CUDA graphs, overlap scheduling on. Greedy; tree",
        f"budget {page['budget']}, block 8, draft window 96. The pair was trained on windows of 256 tokens: a prompt",
        "ends with 96 of held-out text, and before them is filler that attention reads and the pair ignores. So",
        "acceptance is the pair's own, alike at every context; a drafter trained for long contexts may lose some.",
        "Tokens per second of a whole batch; medians of interleaved rounds, the mean over texts (8, or one batch).",
        "Adaptive is measured after 10 s of the row's kind of answers, and 120 steps; what it did in the first stands",
        "beside it.",
        "Made by `python -m tools.bench_ddtree`.",
        "",
        *table(
            "context | batch | none tok/s | chain | tree | adaptive | adaptive / best | its first answer "
            "| accept: chain | tree | adaptive | rounds | note",
            map(_speeds, page["rows"]),
        ),
        "",
        "![tokens per second](ddtree.png)",
        "",
        "## What a step spends outside the two forward passes",
        "",
        "Device time from torch profiles of the tree at 32k context, medians over the steps, microseconds.",
        "",
        *table(
            "batch | step | draft forward | target forward | drafter's KV | all else | of it in graphs | host waits",
            map(_step, page["profiles"]),
        ),
        "",
        "## Greedy tokens",
        "",
        *table(
            "pair | prompts | identical | ties | errors | noise, nats",
            itertools.starmap(_tokens, page["equal"].items()),
        ),
    ]
    return "\n".join(lines) + "\n"


def _speeds(row: dict[str, Any]) -> list[str]:
    rates = {mode: row.get(f"{mode}_tok_s") for mode in MODES}
    best = max(filter(None, (rates[mode] for mode in MODES[:3])), default=None)
    cells = [f"{row['ctx']:,}", str(row["bs"]), *(number(rate, 0) for rate in rates.values())]
    cells.append(number(rates["adaptive"] and best and rates["adaptive"] / best, 2))
    cells.append(number(next(iter(row.get("learning_tok_s", [])), None), 0))
    cells += [number(row.get(f"{mode}_accept_len"), 2) for mode in MODES[1:]]
    return [*cells, str(_rounds(row)), row.get("note", "")]


def _rounds(row: dict[str, Any]) -> int:
    """How often the modes took turns, over all of the row's texts."""
    return min(sum(map(len, row[f"{mode}_repeats_tok_s"])) for mode in MODES if f"{mode}_tok_s" in row)


def _step(row: dict[str, Any]) -> list[str]:
    return [str(row["bs"]), *(number(row[key], 0) for key in PARTS), str(row["host_waits"])]


def _tokens(pair: str, found: dict[str, Any]) -> list[str]:
    counts = [found["prompts"], found["identical"], found["ties"], len(found["errors"])]
    return [pair, *map(str, counts), number(found["noise"], 3)]


def _plot(page: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    batches = sorted({row["bs"] for row in page["rows"]})
    figure = Figure(figsize=(4 * len(batches), 3.5), layout="constrained")
    for axes, batch in zip(figure.subplots(1, len(batches), squeeze=False)[0], batches, strict=True):
        rows = [row for row in page["rows"] if row["bs"] == batch]
        for mode, style in zip(MODES, ("o-", "s-", "^-", "k--"), strict=True):
            axes.plot(
                [row["ctx"] for row in rows], [row.get(f"{mode}_tok_s", math.nan) for row in rows], style, label=mode
            )
        axes.set(xscale="log", yscale="log", xlabel="context, tokens", title=f"batch {batch}")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("tokens per second")
    figure.axes[0].legend()
    figure.savefig(path, dpi=120)

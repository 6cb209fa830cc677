"""Renders what `tools.bench_server` measured as docs/bench/server.{json,md,png}."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.markdown import number, table

INTRODUCTION = """\
# The server, ours against stock

{gpu}, torch {torch}; compiled for sm_90, run on sm_90. A random Kimi-shaped model: 8 layers, 8 heads
(one TP-8 rank), latent 512 + 64, MoE; bf16 weights, page size 1, CUDA graphs, overlap scheduling on. Stock is the same
wheel with Triton's decode and verify, which is what an sm_120 gets (left alone, upstream takes kernels for Hopper here,
see kernel.md), and FlashInfer's prefill. Chain rows: DFLASH with 4 tokens a step (set, for the
drafter is random), a drafter with bf16 KV and a window of 4,096 tokens on both sides. All servers are up at once and
take turns; rows of ddtree are DDTREE with one candidate a position, which is the same chain, against stock's DFLASH: no
accept length is set there, and tok/s says what the step would give at 4 tokens. Medians of 3 turns (2 where a step
takes over 150 ms; up to 10 in rows that state their turns in the JSON). A step's time is the difference of two calls,
each from the end of the prompt to the last token, divided by the steps that one has more. Rows noted "from arrival"
(medians of 5) began the clock when the request came: of 49 rows taken both ways, stock's step at batch 1 and 32k
tokens or more came out 6 to 17% longer then (probably the step that overlap scheduling runs past a request's end held
up the next); ours, a few milliseconds, came out 0.67 to 1.75 times. The requests of a batch share all but their last
16 tokens. Steps under about 5 ms are bound by the host: launch and scheduler, the same on both sides. KV "auto" is
bf16. A row or line names the kernel sources it ran on. Made by `python -m tools.bench_server`; what is missing was
not measured.
"""
PREFILL = """
## Prompts

Seconds from a cached prompt of {begin:,} tokens to one of {end:,}, chunks of 8,192. flashinfer: that backend.
"""
GREEDY = """
## Greedy tokens

32 new tokens each for prompts of 1 to 32,000 tokens, every prompt alone. Noise is the largest difference of a chosen
token's log-probability over the positions before any divergence, in nats. The first divergence of a prompt is a tie
when the reference's top-2 gap there is at most the tie gap, else an error; the rest of that prompt follows another text
and is not compared. The tie gap is twice the noise of stock against Triton, upstream on both sides with two prefills,
for every pair whose KV has one dtype, and twice the pair's own noise where one has fp8 or the note says so. "triton" is
stock with Triton's prefill too; "auto" is bf16 KV. The choices of the random model are close calls, so that the rule
tells little there, as its control shows, where half of each prompt of 1,000 tokens or more was replaced; "trained" is
the pair of tests/fixtures grown to a rank's width, on held-out text.
"""


def render(results: Path, docs: Path) -> None:
    """Merge `docs/server.json` and the result files of `results` into `server.json`, `server.md` and `server.png`.

    Of a row that was measured again the newest is kept (files in the order of their names). Raises SystemExit if they
    are of different GPUs or torches.
    """
    sources = [docs / "server.json", *sorted(results.rglob("*.json"))]
    parts = [json.loads(path.read_text()) for path in sources if path.exists()]
    where = {name: {part[name] for part in parts} for name in ("gpu", "torch")}
    if any(len(values) != 1 for values in where.values()):
        raise SystemExit(f"error: {', '.join(map(str, sources))} mix machines ({where}): keep the files of one")
    page: dict[str, Any] = {name: values.pop() for name, values in where.items()}
    rows = {(r["mode"], r["kv_dtype"], r["bs"], r["ctx"]): r for part in parts for r in part["rows"]}
    page["rows"] = [rows[key] for key in sorted(rows)]
    page["prefill"] = list({row["kv_dtype"]: row for part in parts for row in part["prefill"]}.values())
    page["equal"] = {pair: found for part in parts for pair, found in part["equal"].items()}
    (docs / "server.json").write_text(json.dumps(page, indent=1) + "\n")
    (docs / "server.md").write_text(markdown(page))
    _plot(page["rows"], page["gpu"], docs / "server.png")


def markdown(page: dict[str, Any]) -> str:
    """The page."""
    return "\n".join(_lines(page)) + "\n"


def _lines(page: dict[str, Any]) -> Iterator[str]:
    yield INTRODUCTION.format(gpu=page["gpu"], torch=page["torch"])
    yield from table(
        "mode | KV | batch | context | stock tok/s | ours tok/s | stock ms a step | ours ms a step | stock / ours "
        "| kernels | note",
        map(_steps, page["rows"]),
    )
    yield "\n![milliseconds a step by context](server.png)"
    if page["prefill"]:
        yield PREFILL.format(begin=page["prefill"][0]["from"], end=page["prefill"][0]["to"])
        yield from table("KV | flashinfer s | ours s | ours / flashinfer", map(_prompts, page["prefill"]))
    if page["equal"]:
        yield GREEDY
        yield from table(
            "pair | prompts | identical | ties | errors | tokens compared | mean difference | noise | tie gap "
            "| kernels | note",
            itertools.starmap(_tokens, page["equal"].items()),
        )


def _steps(row: dict[str, Any]) -> list[str]:
    stock, ours = row["stock_step_ms"], row["ours_step_ms"]
    cells = [row["mode"], row["kv_dtype"], str(row["bs"]), f"{row['ctx']:,}"]
    cells += [number(row["stock_tok_s"], 0), number(row["ours_tok_s"], 0), number(stock, 2), number(ours, 2)]
    return [*cells, number(stock and ours and stock / ours, 2), row["kernel_hash"][:8], row.get("note", "")]


def _prompts(row: dict[str, Any]) -> list[str]:
    flashinfer, ours = row["flashinfer_s"], row["ours_s"]
    ratio = flashinfer and ours and ours / flashinfer
    return [row["kv_dtype"], *(number(value, 2) for value in (flashinfer, ours, ratio))]


def _tokens(pair: str, found: dict[str, Any]) -> list[str]:
    counts = [found["prompts"], found["identical"], found["ties"], len(found["errors"]), found["positions"]]
    cells = [pair, *map(str, counts)]
    cells += [number(found["mean"], 4), number(found["noise"], 3), number(found["tie_gap"], 3)]
    return [*cells, found["kernel_hash"][:8], found.get("note", "")]


def _plot(rows: list[dict[str, Any]], gpu: str, path: Path) -> None:
    """A panel for each mode and KV dtype: milliseconds a step over the context; solid ours, dashed stock."""
    from matplotlib.figure import Figure

    modes, kv_dtypes = (sorted({row[name] for row in rows}) for name in ("mode", "kv_dtype"))
    figure = Figure(figsize=(4 * len(modes), 3.2 * len(kv_dtypes)), layout="constrained")
    grid = figure.subplots(len(kv_dtypes), len(modes), sharex=True, sharey=True, squeeze=False)
    for (kv, mode), axes in zip(itertools.product(kv_dtypes, modes), grid.flat, strict=True):
        panel = [row for row in rows if (row["mode"], row["kv_dtype"]) == (mode, kv)]
        for color, bs in enumerate(sorted({row["bs"] for row in panel})):
            line = [row for row in panel if row["bs"] == bs]
            for who, style in (("ours", "o-"), ("stock", "x--")):
                times = [row[f"{who}_step_ms"] or math.nan for row in line]
                axes.plot([row["ctx"] for row in line], times, style, color=f"C{color}", label=f"{who}, batch {bs}")
        axes.set(xscale="log", yscale="log", title=f"{mode}, KV {kv}")
        axes.grid(alpha=0.3)
        if panel:
            axes.legend(fontsize="x-small")
    figure.suptitle(gpu)
    figure.supxlabel("context, tokens")
    figure.supylabel("milliseconds a step")
    figure.savefig(path, dpi=100)

"""The page and the picture of `tools/bench_defrag.py`'s results, of whichever parts there are. Runs anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.markdown import table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Part = dict[str, Any]
BUDGET_FILLED = 0.9
"""Of the units that a pass may move: with so many it counts as one that fills its budget; it moves whole windows."""


def render(file: Path) -> None:
    """Write the page `.md` and the plots `.png` beside the results `file`."""
    if not file.exists():
        raise SystemExit(f"error: {file} does not exist: run parts of tools.bench_defrag first, or name another --out")
    results = json.loads(file.read_text())
    file.with_suffix(".md").write_text(markdown(results, file.stem))
    _plot(results, file.with_suffix(".png"))


def markdown(results: dict[str, Part], name: str) -> str:
    """The page; each part says what it ran on. Plots are those in `name`.png."""
    lines = [
        "# KV defragmentation, measured",
        "",
        "Made by `python -m tools.bench_defrag`; what is missing was not measured. What the figures mean for a server",
        "is in [kvdefrag](../kvdefrag.md). Medians, compared within one run.",
        "",
        f"![attention, the move, served traffic]({name}.png)",
    ]
    for key, (title, tables) in SECTIONS.items():
        if key in results:
            part = results[key]
            lines += ["", f"## {title}", "", _ran_on(part["machine"]), *tables(part)]
    return "\n".join(lines) + "\n"


def _ran_on(machine: dict[str, str]) -> str:
    device = machine["gpu"]
    if device == "none":
        device = f"CPU, {machine['cpu']}"
    elif "sm_120" not in device:
        device += " (not sm_120)"
    return f"{device}, torch {machine['torch']}, kernel sources {machine['kernel_hash'][:12]}."


def _table(head: str, rows: Iterable[Iterable[str]]) -> list[str]:
    return ["", *table(head, rows)]


def _churn(part: Part) -> list[str]:
    trace = part["trace"]
    phases = ("prefill", "cache", "check", "step", "release")
    lines = [
        "",
        f"One trace of {trace['steps']:,} steps, a pool of {trace['pool_tokens']:,} tokens.",
        f"{part['repeats']} interleaved replays of each. The time is CPU time a step inside upstream's calls: prefill,",
        "caching of a prompt, the check for room before a step (which evicts), the step's allocation, release.",
        "Hits: tokens of prompts that the prefix cache had.",
    ]
    rows = [
        [
            f"verify {case['verify_block']}" if case["verify_block"] else "none",
            str(case["extent_tokens"] or "stock"),
            f"{case['mean_run_length']:.1f}",
            f"{case['run_length_ratio']:.1f}x",
            f"{case['contiguity']:.3f}",
            f"{case['alloc_us_per_step']:.0f}",
            f"{case['alloc_time_ratio']:.2f}x",
            f"{case['cached_tokens']:,.0f}",
            *(f"{case[f'{phase}_us_per_step']:.0f}" for phase in phases),
        ]
        for case in part["cases"]
    ]
    head = "speculation | extent | mean run, slots | against stock | contiguity | µs a step | against stock | hits"
    return lines + _table(" | ".join([head, *phases]), rows)


def _map(part: Part) -> list[str]:
    return [
        "",
        f"{part['passes']} passes of at most {part['units_a_pass']:,} units: {_gain(part)}.",
        "",
        "![before and after](kv-map.png)",
    ]


def _gain(part: Part) -> str:
    return (
        f"mean run {part['mean_run_length_before']:.1f} to {part['mean_run_length_after']:.0f} slots, "
        f"contiguity {part['contiguity_before']:.3f} to {part['contiguity_after']:.3f}"
    )


def _kernel(part: Part) -> list[str]:
    rows = [
        [
            f"{case['requests']} x {part['tokens'] // case['requests']:,}",
            str(case["q_len"]),
            f"{case['run_length']:,}",
            f"{case['contiguity_page_1']:.3f}",
            "-" if case["contiguity_page_64"] is None else f"{case['contiguity_page_64']:.3f}",
            f"{case['ms']:.4f}",
            f"{case['gb_per_s']:,.0f}",
        ]
        for case in part["cases"]
    ]
    return _table("requests x tokens | queries | run, slots | contiguity, page 1 | page 64 | ms | GB/s", rows)


def _fastpath(part: Part) -> list[str]:
    rows = [
        [
            str(case["requests"]),
            str(case["q_len"]),
            f"{case['ms']['indices']:.4f}",
            f"{case['ms']['contiguous']:.4f}",
            f"{case['gain']:+.1%}",
        ]
        for case in part["cases"]
    ]
    return _table("requests | queries | slots read, ms | slots computed, ms | gain", rows)


def _move(part: Part) -> list[str]:
    rows = [
        [f"{case['window_units']:,}", f"{case['ms']:.2f}", f"{case['gb_per_s']:,.0f}", f"{case['of_copy_rate']:.0%}"]
        for case in part["cases"]
    ]
    text = f"{part['layers']} layers, {part['slots']:,} slots; a copy on the device: {part['copy_gb_per_s']:,.0f} GB/s."
    if "anywhere" in part:
        text += f" Lists of slots that lie anywhere: {part['anywhere']['of_copy_rate']:.0%} of it."
    return ["", text, *_table("slots of a window | ms | GB/s | of the copy", rows)]


def _compaction(part: Part) -> list[str]:
    passes, median, rate = part["all"], part["median"], part["of_copy_rate"]
    first = part["first_round"]
    *_, first_rate = _moved(first, first, part["copy_gb_per_s"])
    filled = BUDGET_FILLED * part["budget_units"]
    groups = {
        f"at least {BUDGET_FILLED:.0%} of the budget": [p for p in passes if p["units"] >= filled],
        "fewer": [p for p in passes if p["units"] < filled],
        "that sort windows, or gather one piece": [p for p in passes if not p["gathers"]],
        "that gather several": [p for p in passes if p["gathers"]],
        "all": passes,
    }
    spans = {
        "move": "first launch of the move to its last, on the device",
        "commit": "to the last launch of the pass, on the device",
        "wall": "the whole pass, wall clock",
    }
    rows = [
        [text, f"{median[f'{of}_ms']:.2f}", f"{part['gb_per_s'][of]:,.0f}", f"{rate[of]:.0%}"]
        for of, text in spans.items()
    ]
    return [
        "",
        f"{part['passes']} passes over a pool of {part['pool_tokens']:,} tokens, {part['layers']} layers, at most "
        f"{part['budget_units']:,} units each.",
        f"Survey {median['survey_ms']:.1f} ms, plan {median['plan_ms']:.1f} ms. Bytes are those read and written;",
        f"a copy on the device: {part['copy_gb_per_s']:,.0f} GB/s.",
        f"What upstream's allocator left after churn: {_gain(part)},",
        f"in {len(first)} passes, the move at {first_rate} of the copy.",
        *_table(
            "passes that moved | number | of all bytes | the move, GB/s | of the copy",
            [[name, *_moved(group, passes, part["copy_gb_per_s"])] for name, group in groups.items() if group],
        ),
        *_table("from the first launch of the move | ms, median | GB/s, all passes | of the copy", rows),
    ]


def _moved(group: list[Part], passes: list[Part], copy_gb_per_s: float) -> list[str]:
    """Number of the passes in `group`, their share of the bytes of all `passes`, the rate of their moves."""
    moved = sum(p["bytes"] for p in group)
    gb_per_s = moved / sum(p["move_ms"] for p in group) / 1e6
    share = moved / sum(p["bytes"] for p in passes)
    return [str(len(group)), f"{share:.0%}", f"{gb_per_s:,.0f}", f"{gb_per_s / copy_gb_per_s:.0%}"]


def _steps(part: Part) -> list[str]:
    means = part["mean_ms_of_stretches"]
    off = means["off"]
    return [
        "",
        f"{part['requests']} requests, attention of {part['layers']} layers; {part['steps']:,} steps each.",
        f"Passes in each stretch: {', '.join(map(str, part['passes']))}.",
        f"The means of the stretches without compaction lie within {max(off) / min(off) - 1:.1%}.",
        *_step_table(part["off"], part["on"]),
    ]


def _step_table(off: dict[str, float], on: dict[str, float]) -> list[str]:
    keys = [key for key in off if key in ("mean_ms", "p50_ms", "p95_ms", "p98_ms", "p99_ms", "longest_ms")]
    rows = [[key[:-3], f"{off[key]:.3f}", f"{on[key]:.3f}", f"{on[key] / off[key] - 1:+.1%}"] for key in keys]
    return _table("step | off, ms | compacting, ms | rise", rows)


def _serve(part: Part) -> list[str]:
    rows = [
        [
            case["tiers"],
            f"{case['tokens_per_s']:,.0f}",
            f"{case['spread']:.1%}",
            f"{case['against_off']:.3f}",
            f"{case['against_off_from']:.3f} to {case['against_off_to']:.3f}",
            f"{case['p99_ms_per_token']:.1f}",
            f"{case['passes']:.0f}",
        ]
        for case in part["cases"]
    ]
    head = "tiers | tokens/s | spread of the repeats | against off, same repeat | from, to | p99 ms a token | passes"
    steps = part["steps"]
    return [
        "",
        f"{part['repeats']} repeats of {part['requests']} requests, {part['arrivals_per_s']:.0f} (Poisson) a second.",
        *_table(head, rows),
        "",
        f"Steps while 32 requests decode, as a client sees them; with tier 1 {steps['1']['passes']:.0f} passes of "
        f"{steps['1']['host_ms_a_pass']:.1f} ms on the host.",
        f"One variant's mean step differs from itself by up to {max(row['spread'] for row in steps.values()):.0%}.",
        *_step_table(steps["off"], steps["1"]),
    ]


SECTIONS: dict[str, tuple[str, Callable[[Part], list[str]]]] = {
    "churn on cpu": ("Tier 0 on a replayed trace, CPU", _churn),
    "churn on cuda": ("Tier 0 on a replayed trace, tables on a GPU", _churn),
    "map": ("Tier 1 to the end", _map),
    "kernel": ("Attention by contiguity", _kernel),
    "fastpath": ("A kernel that reads no indices, on contiguous KV", _fastpath),
    "move": ("The move", _move),
    "compaction": ("Whole passes", _compaction),
    "steps": ("Decode steps while compacting", _steps),
    "serve": ("Served traffic", _serve),
}


def _plot(results: dict[str, Part], path: Path) -> None:
    from matplotlib.figure import Figure

    panels: list[Callable[[Axes], None]] = []
    if "kernel" in results:
        panels += [partial(_attention, part=results["kernel"], page=page) for page in (1, 64)]
    if "move" in results:
        panels.append(partial(_windows, part=results["move"]))
    if "serve" in results:
        panels.append(partial(_tiers, part=results["serve"]))
    if not panels:
        return
    figure = Figure(figsize=(4 * len(panels), 4), layout="constrained")
    for axes, draw in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes)
    figure.savefig(path, dpi=110)


def _attention(axes: Axes, part: Part, page: int) -> None:
    cases, tokens = part["cases"], part["tokens"]
    for batch, q_len in dict.fromkeys((case["requests"], case["q_len"]) for case in cases):
        rows = [case for case in cases if (case["requests"], case["q_len"]) == (batch, q_len)]
        at = [row for row in rows if row[f"contiguity_page_{page}"] is not None]
        scattered = at[0]["gb_per_s"]
        axes.plot(
            [row[f"contiguity_page_{page}"] for row in at],
            [row["gb_per_s"] / scattered for row in at],
            "o-",
            label=f"{batch} x {tokens // batch:,} tokens, {q_len} queries: {scattered:,.0f} GB/s",
        )
    axes.set(title=_title(f"attention, page size {page}", part), xlabel="contiguity", ylim=(0.9, 1.1))
    axes.set_ylabel("bandwidth, against contiguity 0")
    axes.legend(fontsize=7)


def _windows(axes: Axes, part: Part) -> None:
    windows = part["cases"]
    axes.plot([row["window_units"] for row in windows], [row["of_copy_rate"] for row in windows], "s-")
    axes.set_xscale("log", base=2)
    axes.set_xticks([row["window_units"] for row in windows], [f"{row['window_units']:,}" for row in windows])
    axes.axhline(0.7, ls=":", color="grey")
    axes.set(title=_title("move", part), xlabel="slots of a window", ylabel="bandwidth, against a device copy")
    axes.set_ylim(0, 1)


def _tiers(axes: Axes, part: Part) -> None:
    for place, case in enumerate(part["cases"]):
        rates = [row["tokens_per_s"] for row in case["repeats"]]
        axes.plot([place] * len(rates), rates, "_", color="grey")
        axes.plot(place, case["tokens_per_s"], "o")
    axes.set_xticks(range(len(part["cases"])), [case["tiers"] for case in part["cases"]])
    axes.set(title=_title("served traffic", part), xlabel="tiers", ylabel="tokens a second: median, repeats")
    axes.set_ylim(0, 1.1 * max(row["tokens_per_s"] for case in part["cases"] for row in case["repeats"]))


def _title(text: str, part: Part) -> str:
    machine = part["machine"]
    return f"{text}\n{machine['gpu']}, kernels {machine['kernel_hash'][:8]}"

"""The page and the plot of what `kernel_bench` measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tools.markdown import number, table

COLUMNS = (
    "ours_ms",
    "triton_ms",
    "flashmla_ms",
    "flashinfer_ms",
    "flashinfer_fa3_ms",
    "gbps",
    "tflops",
    "roofline_percent",
)


def _cell(column: str, value: float | None) -> str:
    return number(value, 4 if column.endswith("_ms") and value is not None and value < 100 else 0)


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    keys = [row["h"], row["bs"], f"{row['ctx']:,}", row["q"], row["page"], row["kv_dtype"], row["layout"]]
    return [*map(str, keys), *(_cell(column, row.get(column)) for column in COLUMNS)]


def markdown(report: dict[str, Any]) -> str:
    """The report as a Markdown page."""
    lines = [
        f"# Verify kernel on {report['gpu']}",
        "",
        f"torch {report['torch']}, kernels {report['kernel_hash'][:12]}, {report['sms']} SMs. Measured ceilings: read "
        f"{report['read_gbps']:,} GB/s, matmul {report['matmul_tflops']} TFLOP/s. "
        f"Workspace {report['workspace_bytes']:,} B, whatever the shape.",
        "Milliseconds a layer, median of graph replays, one run. Triton is SGLang's extend kernel with mask (q > 1) or "
        "its decode kernel (q = 1), and what SGLang chooses on sm_120. "
        "FlashMLA and FlashInfer's FA3 need Hopper's wgmma and take no tree mask; "
        "FA2 is FlashInfer's too, on mma.sync as ours. FlashMLA reads 64-token pages in every row. "
        "GB/s and TFLOP/s count each latent row "
        "and each product once; the roof is the larger of bytes over read bandwidth and products over matmul rate.",
        "",
        *table(
            "H | bs | context | q | page | KV | layout | ours | Triton | FlashMLA | FA2 | FA3 "
            "| GB/s | TFLOP/s | % roof",
            map(cells, report["rows"]),
        ),
        "",
    ]
    lines += [f"- {name} not run everywhere: {reason}" for name, reason in report["peers_not_run"].items()]
    return "\n".join(lines) + "\n"


def plot(report: dict[str, Any], path: Path) -> None:
    """Time against q at the longest context, ours and the peers', bs 1 and 8 heads."""
    from matplotlib.figure import Figure

    rows = [
        r
        for r in report["rows"]
        if (r["h"], r["bs"], r["kv_dtype"], r["layout"], r["page"]) == (8, 1, "bf16", "scattered", 1)
    ]
    longest = max(r["ctx"] for r in rows)
    figure = Figure(figsize=(11, 4))
    axes = figure.subplots(1, 2)
    names = {"ours_ms": "ours", "triton_ms": "SGLang Triton", "flashmla_ms": "FlashMLA", "flashinfer_ms": "FA2",
             "flashinfer_fa3_ms": "FA3"}  # fmt: skip
    for axis, key, chosen, label in (
        (axes[0], "q", [r for r in rows if r["ctx"] == longest], f"new tokens a request, context {longest:,}"),
        (axes[1], "ctx", [r for r in rows if r["q"] == 9], "context, q = 9"),
    ):
        for column, name in names.items():
            points = sorted((r[key], r[column]) for r in chosen if r.get(column))
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set(xlabel=label, ylabel="ms a layer", xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(f"MLA verify, 8 heads, batch 1, bf16, page size 1 scattered, {report['gpu']}")
    figure.tight_layout()
    figure.savefig(path, dpi=110)

"""A model of the verify kernel's time, checked against measured rows, and what it predicts for an RTX PRO 6000.

A block works through its tiles of 16 tokens one by one. A tile takes the longer of a role's chain of dependent steps
and the tensor cores' products; the launch takes the longer of that and of reading the KV once, plus a fixed part
(launches, look-ups, filling the pipeline, merge).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools import markdown

ROW_GROUP, MAX_GROUPS, TILE_TOKENS, MIN_TILES = 8, 6, 16, 4
MMAS_PER_GROUP = 17  # of a tile on one of four tensor cores: 9 steps of 16 columns, 8 tiles of 16 latents


@dataclass(frozen=True)
class Gpu:
    """Clocks of an m16n8k16 on one tensor core; chain clocks a tile = chain + chain_per_group * row groups."""

    name: str
    sms: int
    ghz: float
    read_gbps: float
    mma_clocks: float
    fixed_us: float
    chain: float = 340
    chain_per_group: float = 120


H200 = Gpu("H200", 132, 1.75, 4300, 6.2, 18)
# Not measured: 400 TFLOP/s of bf16 GEMM and 2.4 GHz give 18.5 clocks an mma; 1,600 of the specified 1,792 GB/s.
RTX_PRO_6000 = Gpu("RTX PRO 6000", 188, 2.4, 1600, 18.5, 13)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def predict_ms(gpu: Gpu, row: dict[str, Any]) -> float:
    """Milliseconds of one launch for a row of kernel.json (keys h, bs, ctx, q, kv_dtype)."""
    rows = row["h"] * row["q"]
    groups = _ceil_div(_ceil_div(rows, _ceil_div(rows, ROW_GROUP * MAX_GROUPS)), ROW_GROUP)
    row_tiles = _ceil_div(rows, ROW_GROUP * groups)
    splits = max(1, gpu.sms // row_tiles)
    waves = _ceil_div(row_tiles * splits, gpu.sms)
    tiles = max(MIN_TILES, _ceil_div(row["bs"] * _ceil_div(row["ctx"], TILE_TOKENS), splits))
    clocks = max(gpu.chain + gpu.chain_per_group * groups, MMAS_PER_GROUP * groups * gpu.mma_clocks)
    compute_us = waves * tiles * clocks / gpu.ghz / 1e3
    memory_us = row["bs"] * row["ctx"] * 576 * (1 if row["kv_dtype"] == "fp8" else 2) / gpu.read_gbps / 1e3
    return (gpu.fixed_us + max(compute_us, memory_us)) / 1e3


def table(report: Path) -> list[str]:
    """Measured and modelled H200 times and the prediction, each distinct shape of a kernel.json a line of Markdown."""
    rows = json.loads(report.read_text())["rows"]
    return markdown.table(
        "H | bs | context | q | KV | H200 measured ms | model ms | model / measured | RTX PRO 6000 predicted ms",
        (_cells(row) for row in rows if row["page"] == 1 and row["layout"] == "scattered"),
    )


def _cells(row: dict[str, Any]) -> list[str]:
    model, measured = predict_ms(H200, row), row["ours_ms"]
    keys = [str(row["h"]), str(row["bs"]), f"{row['ctx']:,}", str(row["q"]), row["kv_dtype"]]
    return [*keys, f"{measured:.4f}", f"{model:.4f}", f"{model / measured:.2f}", f"{predict_ms(RTX_PRO_6000, row):.3f}"]

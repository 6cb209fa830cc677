"""The committed benchmark: complete, and described by the model that the prediction for sm_120 rests on."""

from __future__ import annotations

import json
from pathlib import Path

from tools import kernels
from tools.kernel_model import H200, RTX_PRO_6000, predict_ms, table

DOCS = Path(__file__).resolve().parents[2] / "docs"
REPORT = json.loads((DOCS / "bench" / "kernel.json").read_text())
PEERS = {"triton_ms", "flashmla_ms", "flashinfer_ms"}


def test_report_has_what_its_readers_expect() -> None:
    assert {"gpu", "torch", "kernel_hash", "read_gbps", "matmul_tflops", "rows"} <= REPORT.keys()
    for row in REPORT["rows"]:
        assert {"h", "bs", "ctx", "q", "page", "kv_dtype", "layout", "ours_ms"} | PEERS <= row.keys()
        assert row["ours_ms"] > 0


def test_the_report_is_of_these_kernels() -> None:
    """Otherwise the kernels have changed since they last ran: `make bench` on a GPU, and commit what it writes."""
    assert REPORT["kernel_hash"] == kernels.source_hash()


def test_model_is_within_a_fifth_of_every_long_launch() -> None:
    long_rows = [row for row in REPORT["rows"] if row["ours_ms"] > 0.04]
    assert len(long_rows) >= 20
    for row in long_rows:
        assert 0.8 < predict_ms(H200, row) / row["ours_ms"] < 1.2, row


def test_prediction_is_never_faster_than_memory() -> None:
    for row in REPORT["rows"]:
        kv_bytes = row["bs"] * row["ctx"] * 576 * (1 if row["kv_dtype"] == "fp8" else 2)
        assert predict_ms(RTX_PRO_6000, row) > kv_bytes / RTX_PRO_6000.read_gbps / 1e6


def test_the_page_has_the_models_table() -> None:
    page = (DOCS / "kernels.md").read_text()
    for line in table(DOCS / "bench" / "kernel.json"):
        assert line in page

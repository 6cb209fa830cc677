"""`sglang-sm120 moe-balance`: how evenly tokens fall on the experts, what that costs, what would help."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path

from sglang_sm120 import client

REDUNDANT_EXPERTS_PER_RANK = (0, 1, 4)
RTX_PRO_6000 = (1600, 400)
"""GB/s and TFLOP/s that it is assumed to reach; the default of what is modelled."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `moe-balance`."""
    source = parser.add_argument_group("what is judged")
    client.add_arguments(source)
    source.add_argument("--seconds", type=float, default=60, help="how long to record (default 60)")
    source.add_argument("--dump-dir", type=Path, help="where the server writes dumps (default: as upstream, /tmp)")
    source.add_argument("--record", type=Path, help="judge this dump instead of a running server")
    source.add_argument(
        "--copies", type=_above_0(int), help="how often the dump counts a token (default: asked of the server, or 1)"
    )
    layout = parser.add_argument_group("for which layout and GPU")
    layout.add_argument(
        "--ranks", type=_above_0(int), help="GPUs that share the experts (default: asked of the server, or 8)"
    )
    layout.add_argument(
        "--redundant", type=int, nargs="+", help="redundant experts to try (default: 0, 1 and 4 a rank)"
    )
    layout.add_argument("--model", type=Path, help="folder of the model's config.json, for milliseconds")
    layout.add_argument(
        "--weight-bytes", type=_above_0(float), default=2, help="bytes a weight: 2 bf16 (default), 1 fp8, 0.5 int4"
    )
    layout.add_argument(
        "--read-gbps", type=_above_0(float), default=RTX_PRO_6000[0], help="memory bandwidth (default: RTX PRO 6000's)"
    )
    layout.add_argument(
        "--tflops", type=_above_0(float), default=RTX_PRO_6000[1], help="the experts' matmuls (default: RTX PRO 6000's)"
    )
    layout.add_argument("--tile", type=_above_0(int), default=64, help="tokens a tile of the grouped GEMM (default 64)")
    parser.add_argument(
        "--out", type=Path, default=Path("moe-balance"), help="writes OUT.json and OUT.png (default moe-balance)"
    )


def _above_0(kind: Callable[[str], float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text} is no {'whole ' * (kind is int)}number above 0")
        return value

    return parse


def run(arguments: argparse.Namespace) -> None:
    """Record or read, judge, write JSON and picture, print the findings."""
    from sglang_sm120.moe_balance import cost, recording, report

    if arguments.record:
        load = recording.read(arguments.record, arguments.copies or 1)
        ranks, model = arguments.ranks or 8, arguments.model
    else:
        server = recording.RecordingServer(arguments.url, arguments.api_key, arguments.dump_dir)
        recorded = server.record(arguments.seconds)
        load = recording.read(recorded, arguments.copies or server.copies)
        print(f"recorded: {recorded}, which stays; --record reads it again", file=sys.stderr)
        ranks, model = arguments.ranks or server.ranks, arguments.model or server.model
    gpu = cost.Gpu(arguments.read_gbps, arguments.tflops, arguments.weight_bytes, arguments.tile)
    redundant = arguments.redundant or [ranks * per_rank for per_rank in REDUNDANT_EXPERTS_PER_RANK]
    findings = report.findings(load, gpu, ranks, redundant, recording.expert_weights(model) if model else None)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    table, picture = (arguments.out.with_name(arguments.out.name + suffix) for suffix in (".json", ".png"))
    table.write_text(report.to_json(findings))
    report.draw(load).save(picture)
    print(report.text(findings))
    if ranks == 1:
        print("one rank has all experts: --ranks N judges the layout of N")
    print(f"written: {table} and {picture}")

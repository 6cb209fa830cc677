"""Stock SGLang against ours on this machine's GPUs, end to end, with upstream's bench_serving as the client.

    python -m tools.bench_e2e --model MODEL [--draft DRAFTER] --serve-flags="--tp 8" --out build/bench-e2e

Stock is the installed wheel with our plugin not loaded. One server at a time; every (context, batch) is a cell, saved
as soon as it is measured. The same command run again does what is missing. `--cpu` tries it without a GPU: ours only
(stock has no MLA attention there), on the trained pair of tests/fixtures, its figures worth nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tools import kernels, require_gpu, server
from tools.project import write_atomic

PAIR = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "pair"
# Upstream loads the plugins that this names: none of that name exists.
NO_PLUGINS = {"SGLANG_PLUGINS": "stock"}
CPU_FLAGS = [*server.CPU_FLAGS, "--dtype", "float32", "--context-length", "2048"]
CONTEXTS, CPU_CONTEXTS = (1024, 8192, 32768, 65536, 131072, 185000), (64, 256)
GPU_FLAGS = ["--skip-server-warmup"]
SPECULATION = {"plain": None, "dflash": "DFLASH", "ddtree": "DDTREE"}
KEPT = (
    "output_throughput",
    "median_ttft_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "accept_length",
    "duration",
    "completed",
)


@dataclass(frozen=True)
class Plan:
    """What is measured: every context at every batch on every server."""

    model: str
    draft: str | None
    contexts: Sequence[int]
    batches: Sequence[int]
    modes: Sequence[str]
    output_tokens: int
    rounds: int
    serve_flags: str
    spec_flags: str
    ours_flags: str
    stock_flags: str
    cell_timeout_s: float
    cpu: bool

    def servers(self) -> Iterator[tuple[str, str]]:
        """(who, mode) of each server to start."""
        for mode in self.modes:
            if SPECULATION[mode] is None or self.draft:
                if mode != "ddtree" and not self.cpu:
                    yield "stock", mode
                yield "ours", mode

    def flags(self, who: str, mode: str) -> list[str]:
        """Flags of that server after the defaults of the machine."""
        flags = shlex.split(self.serve_flags) + shlex.split(self.ours_flags if who == "ours" else self.stock_flags)
        if algorithm := SPECULATION[mode]:
            flags += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(self.draft)]
            flags += shlex.split(self.spec_flags)
        return flags

    def identity(self) -> dict[str, Any]:
        """What must be the same in all cells of one table."""
        return {
            "gpu": "none (CPU engine)" if self.cpu else torch.cuda.get_device_name(),
            "gpus": 0 if self.cpu else torch.cuda.device_count(),
            "torch": torch.__version__,
            "sglang": importlib.metadata.version("sglang"),
            "kernel_hash": kernels.source_hash(),
            "model": self.model,
            "draft": self.draft,
            "output_tokens": self.output_tokens,
            "rounds": self.rounds,
            "flags": [self.serve_flags, self.spec_flags, self.ours_flags, self.stock_flags],
        }


class Results:
    """The cells measured so far, in a JSON file that is replaced whole after each."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self.document: dict[str, Any] = {"identity": identity, "cells": {}, "servers": {}}
        if path.exists():
            self.document = json.loads(path.read_text())
            for name, value in identity.items():
                if (was := self.document["identity"].get(name)) != value:
                    raise SystemExit(
                        f"error: {path} was measured with {name} {was!r}, this is {value!r}: give another --out, or "
                        "remove that file to begin anew"
                    )

    def has(self, key: str) -> bool:
        """Whether the cell is measured, or known not to fit. One that failed is tried again."""
        return "failed" not in self.document["cells"].get(key, {"failed": ""})

    def put(self, key: str, cell: dict[str, Any]) -> None:
        """Keep a cell."""
        self.document["cells"][key] = cell
        self.save()

    def save(self) -> None:
        """Write the file."""
        write_atomic(self._path, (json.dumps(self.document, indent=1) + "\n").encode())


def run(plan: Plan, out: Path) -> int:
    """Measure what is missing, write the page; returns how many cells failed."""
    results = Results(out / "bench-e2e.json", plan.identity())
    for who, mode in plan.servers():
        cells = [(context, batch) for context in plan.contexts for batch in plan.batches]
        todo = [cell for cell in cells if not results.has(cell_key(who, mode, *cell))]
        print(f"{who}-{mode}: {len(cells) - len(todo)} cells are there, {len(todo)} to do", flush=True)
        if todo:
            serve(plan, who, mode, todo, results, out)
    results.save()
    render(results.document, out)
    failed = [key for key, cell in results.document["cells"].items() if "failed" in cell]
    for key in failed:
        print(f"failed: {key}: {results.document['cells'][key]['failed']}", file=sys.stderr)
    return len(failed)


def cell_key(who: str, mode: str, context: int, batch: int) -> str:
    """Name of a cell in the results."""
    return f"{who}/{mode}/{context}/{batch}"


def serve(plan: Plan, who: str, mode: str, todo: list[tuple[int, int]], results: Results, out: Path) -> None:
    """Start one server and measure its missing cells."""
    env = {"HF_HUB_OFFLINE": str(int(plan.cpu))} | (NO_PLUGINS if who == "stock" else {})
    defaults = CPU_FLAGS if plan.cpu else GPU_FLAGS
    model, log = Path(plan.model), out / f"{who}-{mode}.log"
    try:
        with server.running(model, log, plan.flags(who, mode), env, defaults, plan.cell_timeout_s) as up:
            info = json.loads(up.get("/server_info"))
            results.document["servers"][f"{who}/{mode}"] = {
                name: info.get(name) for name in ("attention_backend", "kv_cache_dtype", "page_size", "tp_size")
            }
            for context, batch in todo:
                room = info["max_total_num_tokens"]
                if batch * (context + plan.output_tokens) > room:
                    cell: dict[str, Any] = {"left_out": f"needs more than the pool of {room} tokens"}
                else:
                    cell = measure(plan, up, context, batch, out)
                results.put(cell_key(who, mode, context, batch), cell)
                print(f"{who}-{mode}, context {context:,}, batch {batch}: {cell}", flush=True)
    except RuntimeError as error:  # the server did not come up: the next one may
        for context, batch in todo:
            key = cell_key(who, mode, context, batch)
            if not results.has(key):
                results.put(key, {"failed": f"the server did not start; see {log}"})
        print(f"{who}-{mode}: {error}", file=sys.stderr)


def measure(plan: Plan, up: server.Server, context: int, batch: int, out: Path) -> dict[str, Any]:
    """One cell by upstream's client: `batch` requests at a time, `rounds` times over."""
    found = out / "client.jsonl"
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", up.url,
               "--dataset-name", "random-ids", "--random-input-len", str(context), "--random-range-ratio", "1",
               "--random-output-len", str(plan.output_tokens), "--num-prompts", str(batch * plan.rounds),
               "--max-concurrency", str(batch), "--warmup-requests", str(batch), "--flush-cache", "--seed", "1",
               "--disable-tqdm", "--output-file", str(found)]  # fmt: skip
    with (out / "client.log").open("a") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, timeout=plan.cell_timeout_s, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done in {plan.cell_timeout_s:.0f} s"}
    if done.returncode != 0 or not found.exists():
        return {"failed": f"the client ended with {done.returncode}; see {out / 'client.log'}"}
    result = json.loads(found.read_text().splitlines()[-1])
    if result["completed"] != batch * plan.rounds:
        return {"failed": f"{result['completed']} of {batch * plan.rounds} requests were answered"}
    return {name: result[name] for name in KEPT}


def render(document: dict[str, Any], out: Path) -> None:
    """`bench-e2e.md` and `bench-e2e.png` from the results."""
    rows = table(document["cells"])
    (out / "bench-e2e.md").write_text(markdown(document, rows))
    plot(rows, out / "bench-e2e.png")


def table(cells: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a (mode, context, batch): ours, and stock in the same mode (for ddtree: stock's dflash)."""
    rows = []
    for key, ours in cells.items():
        who, mode, context, batch = key.split("/")
        if who == "ours":
            peer = "dflash" if mode == "ddtree" else mode
            stock = cells.get(f"stock/{peer}/{context}/{batch}", {})
            rows.append({"mode": mode, "context": int(context), "batch": int(batch), "ours": ours, "stock": stock})
    return sorted(rows, key=lambda row: (list(SPECULATION).index(row["mode"]), row["context"], row["batch"]))


def markdown(document: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The page."""
    about = document["identity"]
    backends = ", ".join(f"{name} {facts['attention_backend']}" for name, facts in document["servers"].items())
    lines = [
        f"# End to end: {about['model']} on {about['gpus']} x {about['gpu']}",
        "",
        f"sglang {about['sglang']}, torch {about['torch']}, kernel sources {about['kernel_hash'][:12]}, drafter "
        f"{about['draft']}. Flags {about['flags']}. Attention backends: {backends}.",
        f"Random prompts, {about['output_tokens']} tokens answered, {about['rounds']} rounds a cell, one run. tok/s is "
        "output tokens over the whole run, prompts included; TPOT is the median time a token after the first. Stock in "
        "ddtree rows is stock's dflash.",
        "",
        "| mode | context | batch | stock tok/s | ours tok/s | ours / stock | stock TPOT ms | ours TPOT ms "
        "| stock TTFT ms | ours TTFT ms | ours accept length |",
        "|---" * 11 + "|",
    ]
    for row in rows:
        stock, ours = row["stock"], row["ours"]
        pairs = [
            _figure(side.get(name), digits)
            for name, digits in (("median_tpot_ms", 2), ("median_ttft_ms", 0))
            for side in (stock, ours)
        ]
        speeds = [side.get("output_throughput") for side in (stock, ours)]
        ratio = speeds[1] / speeds[0] if all(speeds) else None
        cells = [row["mode"], f"{row['context']:,}", str(row["batch"]), *(_figure(speed, 1) for speed in speeds)]
        lines.append(
            "| " + " | ".join([*cells, _figure(ratio, 2), *pairs, _figure(ours.get("accept_length"), 2)]) + " |"
        )
    return "\n".join([*lines, "", "![output tokens a second by context](bench-e2e.png)"]) + "\n"


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Output tokens a second by context: ours drawn through, stock dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (mode, batch) in enumerate(sorted({(row["mode"], row["batch"]) for row in rows})):
        for who, style in (("ours", "-o"), ("stock", "--x")):
            chosen = [row for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
            points = [(row["context"], row[who]["output_throughput"]) for row in chosen if "duration" in row[who]]
            if points and not (who == "stock" and mode == "ddtree"):
                label = f"{who}, {mode}, batch {batch}"
                axes.plot(*zip(*points, strict=True), style, color=f"C{number}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="output tokens per second")
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=120)


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="try it without a GPU, on the trained pair")
    parser.add_argument("--model", help="model to serve, a folder or a name on the Hugging Face hub")
    parser.add_argument("--draft", help="its DFlash drafter; without one only plain decoding is measured")
    parser.add_argument("--out", type=Path, default=Path("build/bench-e2e"), help="results, page, plot and logs")
    parser.add_argument("--contexts", type=int, nargs="+", help="default: 1024 to 185000, on the CPU 64 and 256")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--modes", nargs="+", choices=SPECULATION, default=list(SPECULATION))
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="requests a cell, in batches")
    parser.add_argument("--serve-flags", default="", help='flags of every server, in one word: --serve-flags="--tp 8"')
    parser.add_argument("--spec-flags", default="", help="flags of the servers that speculate")
    parser.add_argument("--ours-flags", default="--attention-backend sm120_mla")
    parser.add_argument("--stock-flags", default="", help="upstream's own choice of backends if empty")
    parser.add_argument("--cell-timeout-s", type=float, default=3600, help="for a server's start, and for a cell")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Measure; the exit code is 0 when every cell is there."""
    args = vars(parser().parse_args(words))
    out = args.pop("out")
    if not args["cpu"] and not require_gpu.found():
        return 2
    args["contexts"] = args["contexts"] or (CPU_CONTEXTS if args["cpu"] else CONTEXTS)
    if args["cpu"]:
        args |= {"model": args["model"] or str(PAIR / "target"), "draft": args["draft"] or str(PAIR / "drafter")}
    if not args["model"]:
        print("error: --model is missing: `make bench-e2e MODEL=... [DRAFT=...]`", file=sys.stderr)
        return 2
    if importlib.util.find_spec("datasets") is None:
        print("error: upstream's bench_serving imports the package `datasets`: pip install datasets", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    server.exit_on_sigterm()
    return 1 if run(Plan(**args), out) else 0


if __name__ == "__main__":
    sys.exit(main())

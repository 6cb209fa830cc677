"""Stock SGLang against ours on this machine's GPUs, end to end, with upstream's bench_serving as the client.

    python -m tools.bench_e2e --model MODEL [--draft DRAFTER] --serve-flags="--tp 8" --out build/bench-e2e

Stock is the installed wheel with our plugin not loaded. One server at a time (all of them with --together); every
(context, batch) is a cell, saved as soon as it is measured. The same command run again does what is missing. `--cpu`
tries it without a GPU: ours only (stock has no MLA attention there), on the trained pair of tests/fixtures, its figures
worth nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from tools import e2e_page, kernels, require_gpu, server
from tools.pair import DRAFTER, TARGET
from tools.project import write_atomic

# Upstream loads the plugins that this names: none of that name exists.
NO_PLUGINS = {"SGLANG_PLUGINS": "stock"}
CONTEXTS, CPU_CONTEXTS = (1024, 8192, 32768, 65536, 131072, 185000), (64, 256)
# Upstream adds up accepted tokens when it logs: some lines must fall into a short cell.
GPU_FLAGS = ["--skip-server-warmup", "--decode-log-interval", "8"]
CPU_FLAGS = [*server.CPU_FLAGS, *GPU_FLAGS, "--dtype", "float32", "--context-length", "2048"]
# Of an excerpt, a token. Where the text has longer ones, upstream's client says the excerpt again to fill the context.
CHARACTERS_A_TOKEN = 5
SERVER_FACTS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend", "kv_cache_dtype",
                "page_size", "tp_size")  # fmt: skip
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
    text: Path | None
    output_tokens: int
    rounds: int
    serve_flags: str
    spec_flags: str
    ddtree_flags: str
    ours_flags: str
    stock_flags: str
    together: bool
    minutes: float
    start_timeout_s: float
    cell_timeout_s: float
    cpu: bool

    def servers(self) -> Iterator[tuple[str, str]]:
        """(who, mode) of each server to start."""
        for mode in self.modes:
            if mode == "plain" or self.draft:
                if mode != "ddtree" and not self.cpu:
                    yield "stock", mode
                yield "ours", mode

    def flags(self, who: str, mode: str) -> list[str]:
        """Flags of that server after the defaults of the machine."""
        flags = shlex.split(self.serve_flags) + shlex.split(self.ours_flags if who == "ours" else self.stock_flags)
        if mode != "plain":
            flags += ["--speculative-algorithm", mode.upper(), "--speculative-draft-model-path", str(self.draft)]
            flags += shlex.split(self.spec_flags) + (shlex.split(self.ddtree_flags) if mode == "ddtree" else [])
        return flags

    def environment(self, who: str) -> dict[str, str]:
        """What a server's environment has besides this one. For a model in folders nothing is asked of the hub."""
        folders = all(Path(path).is_dir() for path in (self.model, self.draft) if path)
        offline = "1" if folders else os.environ.get("HF_HUB_OFFLINE", "0")
        return {"HF_HUB_OFFLINE": offline} | (NO_PLUGINS if who == "stock" else {})

    def cells(self) -> Iterable[tuple[int, int]]:
        """(context, batch) of every row."""
        return itertools.product(self.contexts, self.batches)

    def identity(self) -> dict[str, Any]:
        """What must be the same in all cells of one table."""
        text = hashlib.sha256(self.text.read_bytes()).hexdigest()[:12] if self.text else None
        return {
            "gpu": "none (CPU engine)" if self.cpu else torch.cuda.get_device_name(),
            "gpus": 0 if self.cpu else torch.cuda.device_count(),
            "torch": torch.__version__,
            "sglang": importlib.metadata.version("sglang"),
            "kernel_hash": kernels.source_hash(),
            "model": self.model,
            "draft": self.draft,
            "text_sha256": text,
            "together": self.together,
            "output_tokens": self.output_tokens,
            "rounds": self.rounds,
            "flags": [self.serve_flags, self.spec_flags, self.ddtree_flags, self.ours_flags, self.stock_flags],
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
    """Measure what is missing, write the page; returns how many cells are not there."""
    deadline = time.monotonic() + 60 * plan.minutes
    results = Results(out / "bench-e2e.json", plan.identity())
    servers = list(plan.servers())
    try:
        for group in [servers] if plan.together else [[one] for one in servers]:
            missing = [(who, mode) for who, mode in group if todo(plan, results, who, mode)]
            if missing and time.monotonic() < deadline:
                serve(plan, missing, results, out, deadline)
    finally:  # interrupted, too, it leaves the page of what there is
        results.save()
        e2e_page.render(results.document, out)
    absent = [cell_key(*one, *cell) for one in servers for cell in todo(plan, results, *one)]
    failed = {key: results.document["cells"][key]["failed"] for key in absent if key in results.document["cells"]}
    for key, why in failed.items():
        print(f"failed: {key}: {why}", file=sys.stderr)
    if left := len(absent) - len(failed):
        print(f"no time left for {left} cells: the same command does them", file=sys.stderr)
    return len(absent)


def todo(plan: Plan, results: Results, who: str, mode: str) -> list[tuple[int, int]]:
    """(context, batch) of the cells that one server has still to give."""
    return [cell for cell in plan.cells() if not results.has(cell_key(who, mode, *cell))]


def cell_key(who: str, mode: str, context: int, batch: int) -> str:
    """Name of a cell in the results."""
    return f"{who}/{mode}/{context}/{batch}"


def serve(plan: Plan, group: list[tuple[str, str]], results: Results, out: Path, deadline: float) -> None:
    """Start the servers of a group side by side; they take turns at their missing cells, until the deadline."""
    with ExitStack() as stack:
        with ThreadPoolExecutor(len(group)) as pool:
            ups = dict(zip(group, pool.map(lambda one: start(plan, one, results, out, stack), group), strict=True))
        for context, batch in plan.cells():
            for (who, mode), up in ups.items():
                key = cell_key(who, mode, context, batch)
                if results.has(key) or time.monotonic() > deadline:
                    continue
                room = results.document["servers"].get(f"{who}/{mode}", {}).get("pool_tokens")
                if up is None:
                    cell: dict[str, Any] = {"failed": "the server did not start"}
                elif batch * (context + plan.output_tokens) > room:
                    cell = {"left_out": f"needs more than the pool of {room} tokens"}
                else:
                    cell = measure(plan, up, context, batch, out)
                results.put(key, cell)
                print(f"{key}: {cell}", flush=True)


def start(plan: Plan, one: tuple[str, str], results: Results, out: Path, stack: ExitStack) -> server.Server | None:
    """One server that the stack will stop, its facts noted; None if it does not come up."""
    who, mode = one
    left = len(todo(plan, results, who, mode))
    print(f"{who}/{mode}: {len(list(plan.cells())) - left} cells are there, {left} to do", flush=True)
    defaults = CPU_FLAGS if plan.cpu else GPU_FLAGS
    try:
        log, flags, env = out / f"{who}-{mode}.log", plan.flags(who, mode), plan.environment(who)
        up = stack.enter_context(server.running(Path(plan.model), log, flags, env, defaults, plan.start_timeout_s))
        info = up.info()
    except (RuntimeError, OSError) as error:  # its cells fail, those of the others need not
        print(f"{who}/{mode}: {error}", file=sys.stderr, flush=True)
        return None
    facts = {name: info.get(name) for name in SERVER_FACTS} | {"pool_tokens": info["max_total_num_tokens"]}
    results.document["servers"][f"{who}/{mode}"] = facts
    return up


def measure(plan: Plan, up: server.Server, context: int, batch: int, out: Path) -> dict[str, Any]:
    """One cell by upstream's client: `batch` requests at a time, `rounds` times over."""
    found, log, requests = out / "client.jsonl", out / "client.log", batch * plan.rounds
    found.unlink(missing_ok=True)
    flags = ["--backend", "sglang", "--base-url", up.url, "--tokenize-prompt", *prompts(plan, context, requests, out),
             "--random-input-len", str(context), "--random-output-len", str(plan.output_tokens),
             "--random-range-ratio", "1", "--num-prompts", str(requests), "--max-concurrency", str(batch),
             "--warmup-requests", str(batch), "--flush-cache", "--seed", "1", "--ready-check-timeout-sec", "5",
             "--disable-tqdm", "--output-file", str(found)]  # fmt: skip
    if failure := call_client(flags, log, plan.cell_timeout_s):
        return {"failed": failure}
    result = json.loads(found.read_text().splitlines()[-1])
    if result["completed"] != requests:
        return {"failed": f"{result['completed']} of {requests} requests were answered"}
    return {name: result[name] for name in KEPT}


def prompts(plan: Plan, context: int, requests: int, out: Path) -> list[str]:
    """Flags for the client's prompts: random tokens, or excerpts of the text as a file of the kind that it knows."""
    if plan.text is None:
        return ["--dataset-name", "random-ids"]
    text, path = plan.text.read_text("utf-8", "replace"), out / "prompts.json"
    starts = [number * len(text) // requests for number in range(requests)]
    excerpts = [(text[at:] + text[:at])[: CHARACTERS_A_TOKEN * context] for at in starts]
    path.write_text(json.dumps([{"conversations": [{"value": excerpt}, {"value": ""}]} for excerpt in excerpts]))
    return ["--dataset-name", "random", "--dataset-path", str(path)]


def call_client(flags: list[str], log: Path, timeout_s: float) -> str | None:
    """Run upstream's client to its end, or for so long; what went wrong, None if nothing."""
    client = multiprocessing.get_context("forkserver").Process(target=_client, args=(flags, log), daemon=True)
    client.start()
    client.join(timeout_s)
    if client.exitcode is None:
        client.kill()
        client.join()
        return f"not done in {timeout_s:.0f} s"
    return f"the client ended with {client.exitcode}; see {log}" if client.exitcode else None


def load_client() -> None:
    """Begin importing upstream's client, in the process that will be forked for every call."""
    forkserver.set_forkserver_preload(["tools.bench_client"])
    forkserver.ensure_running()


def _client(flags: list[str], log: Path) -> None:
    from tools import bench_client

    bench_client.run(flags, log)


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="try it without a GPU, on the trained pair")
    parser.add_argument("--model", help="model to serve, a folder or a name on the Hugging Face hub")
    parser.add_argument("--draft", help="its DFlash drafter; without one only plain decoding is measured")
    parser.add_argument("--out", type=Path, default=Path("build/bench-e2e"), help="results, page, plot and logs")
    parser.add_argument("--contexts", type=int, nargs="+", help="default: 1024 to 185000, on the CPU 64 and 256")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--modes", nargs="+", choices=e2e_page.MODES, default=e2e_page.MODES)
    parser.add_argument("--text", type=Path, help="prompts are excerpts of this file; default: random tokens, on which "
                        "no drafter guesses right")  # fmt: skip
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="requests a cell, in batches")
    parser.add_argument("--serve-flags", default="", help='flags of every server, in one word: --serve-flags="--tp 8"')
    parser.add_argument("--spec-flags", default="", help="flags of the servers that speculate")
    parser.add_argument("--ddtree-flags", default="", help="further flags of the DDTREE server")
    parser.add_argument("--ours-flags", default="--attention-backend sm120_mla")
    parser.add_argument("--stock-flags", default="", help="upstream's own choice of backends if empty")
    parser.add_argument("--together", action="store_true", help="all servers are up at once and take turns; for a "
                        "model that fits so often: give --max-total-tokens in --serve-flags")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=math.inf, help="no server or cell is begun later")
    parser.add_argument("--start-timeout-s", type=float, default=3600, help="for a server's start")
    parser.add_argument("--cell-timeout-s", type=float, default=3600, help="for a cell")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Measure; the exit code is 0 when every cell is there."""
    args = vars(parser().parse_args(words))
    out = args.pop("out")
    if not args["cpu"] and not require_gpu.can_serve():
        return 2
    args["contexts"] = args["contexts"] or (CPU_CONTEXTS if args["cpu"] else CONTEXTS)
    if args["cpu"]:
        args |= {"model": args["model"] or str(TARGET), "draft": args["draft"] or str(DRAFTER)}
    if not args["model"]:
        print("error: --model is missing: `make bench-e2e MODEL=... [DRAFT=...]`", file=sys.stderr)
        return 2
    if args["text"] and not args["text"].is_file():
        print(f"error: --text {args['text']}: there is no such file", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    load_client()
    return 1 if run(Plan(**args), out) else 0


if __name__ == "__main__":
    server.exit_on_signals()
    sys.exit(main())

"""DDTREE on one GPU: tokens per second of no speculation, chain, tree and adaptive width, and what a tree step costs.

    python -m tools.bench_ddtree run --out DIR       serve, time, profile; leaves JSON and traces in DIR
    python -m tools.bench_ddtree render --out DIR    what that left as docs/bench/ddtree.{json,md,png}

The model is the trained pair, grown (tools/grow_pair.py): the acceptance is real, on held-out text, and so is the cost
of a step. All servers are up at once and take turns.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import shlex
import statistics
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools import bench_server, grow_pair, server
from tools.train_pair import read_texts

BUDGET = 32
MODES = ("none", "chain", "tree", "adaptive")
# Longer prompts are shared by several requests, each with an ending of its own, so that the prefix cache holds them.
DISTINCT_TOKENS, OWN_TOKENS = 300_000, 48
REPEATS = 3
PROFILED = [(1, 32_768), (16, 32_768)]
PROFILED_STEPS = 12


def variants(pair: Path, contexts: list[int], batches: list[int]) -> dict[str, list[str]]:
    """Server flags by mode; the drafter reads the same last tokens in all that draft."""
    sizes = " ".join(map(str, sorted({*batches, *(bs for bs, _ in PROFILED)})))
    pool = max(contexts) + 3 * DISTINCT_TOKENS
    common = shlex.split(
        f"--attention-backend sm120_mla --max-total-tokens {pool} --context-length {max(contexts) + 2000} "
        f"--max-running-requests {max(batches)} --mem-fraction-static 0.2 --cuda-graph-bs-decode {sizes}"
    )
    draft = shlex.split(
        f"--speculative-draft-model-path {pair / 'drafter'} --speculative-draft-attention-backend triton "
        f"--speculative-draft-window-size {bench_server.DRAFT_WINDOW_TOKENS}"
    )
    tree = [*draft, "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(BUDGET)]
    return {
        "none": common,
        "chain": [*common, *draft, "--speculative-algorithm", "DFLASH"],
        "tree": [*common, *tree],
        "adaptive": [*common, *tree, "--speculative-ddtree-adaptive"],
    }


def held_out_tokens(pair: Path) -> list[int]:
    """All of the held-out text, as one list of token ids."""
    from transformers import AutoTokenizer

    texts = read_texts(Path(sysconfig.get_path("stdlib")), training=False)
    return AutoTokenizer.from_pretrained(pair / "target")("".join(texts)).input_ids


def prompts(text: list[int], context: int, batch: int) -> list[list[int]]:
    """Excerpts of `context` tokens; the text starts over where it is too short."""
    distinct = max(1, min(batch, DISTINCT_TOKENS // context))
    stream = itertools.cycle(text)
    shared = [list(itertools.islice(stream, context - OWN_TOKENS)) for _ in range(distinct)]
    own = [list(itertools.islice(stream, 311, 311 + OWN_TOKENS)) for _ in range(batch)]
    return [shared[i % distinct] + own[i] for i in range(batch)]


def timed(up: server.Server, batch: list[list[int]], tokens: int) -> tuple[float, float]:
    """Seconds for `tokens` more tokens of every prompt, and committed tokens a step."""
    few = 8
    seconds = []
    for count in (few, few + tokens):
        begin = time.perf_counter()
        answers = up.generate(batch, count)
        seconds.append(time.perf_counter() - begin)
    steps = [answer["meta_info"].get("spec_verify_ct") for answer in answers]
    accepted = 1.0 if None in steps else len(batch) * (few + tokens - 1) / sum(steps)
    return seconds[1] - seconds[0], accepted


def measure(ups: dict[str, server.Server], text: list[int], context: int, batch_size: int) -> dict[str, Any]:
    """One row: medians of interleaved repeats."""
    batch = prompts(text, context, batch_size)
    tokens = 160 if context * batch_size < 2_000_000 else 48
    seconds: dict[str, list[float]] = {mode: [] for mode in ups}
    row: dict[str, Any] = {"ctx": context, "bs": batch_size}
    for up in ups.values():  # fills the prefix cache; the adaptive one gets used to this text
        up.generate(batch, 8)
        up.generate(batch, tokens)
    for _ in range(REPEATS):
        for mode, up in ups.items():
            elapsed, row[f"{mode}_accept_len"] = timed(up, batch, tokens)
            seconds[mode].append(elapsed)
    for mode in ups:
        row[f"{mode}_tok_s"] = batch_size * tokens / statistics.median(seconds[mode])
        row[f"{mode}_seconds"] = seconds[mode]
    print({k: round(v, 2) for k, v in row.items() if not isinstance(v, list)}, flush=True)
    return row


def profile(up: server.Server, text: list[int], batch_size: int, context: int, trace: Path) -> None:
    """A torch profile of some decode steps, host and device."""
    batch = prompts(text, context, batch_size)
    up.generate(batch, 8)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(up.generate, batch, 400)
        time.sleep(0.3)
        folder = trace.with_suffix("")
        body = {"output_dir": str(folder), "num_steps": PROFILED_STEPS, "activities": ["CPU", "GPU"]}
        up.post_text("/start_profile", body)
        running.result()
    deadline = time.monotonic() + 20
    while not (found := list(folder.rglob("*.json.gz"))) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    trace.write_bytes(found[0].read_bytes())


def run(out: Path, work: Path, contexts: list[int], batches: list[int], cpu: bool) -> None:
    """Serve the four modes, time every (context, batch), profile the tree."""
    begin = time.monotonic()
    pair = grow_pair.grow(work / "pair")
    text = held_out_tokens(pair)
    print(f"pair grown after {time.monotonic() - begin:.0f} s", flush=True)
    rows = []
    with ExitStack() as stack:
        ups = bench_server.launch(stack, pair / "target", out, variants(pair, contexts, batches))
        print(f"{len(ups)} servers ready after {time.monotonic() - begin:.0f} s", flush=True)
        for batch_size, context in PROFILED:
            profile(ups["tree"], text, batch_size, context, out / f"trace-bs{batch_size}.json.gz")
        print(f"profiled after {time.monotonic() - begin:.0f} s", flush=True)
        for context, batch_size in itertools.product(contexts, batches):
            rows.append(measure(ups, text, context, batch_size))
            bench_server.write_result(out / "speed.json", {"budget": BUDGET, "repeats": REPEATS, "rows": rows})

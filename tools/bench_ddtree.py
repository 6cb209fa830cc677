"""DDTREE on one GPU: tokens per second of no speculation, chain, tree and adaptive width, and what a tree step costs.

    python -m tools.bench_ddtree run --out DIR       serve, time, profile; leaves JSON and traces in DIR
    python -m tools.bench_ddtree render --out DIR    what that left as docs/bench/ddtree.{json,md,png}

The model is the trained pair, grown (tools/grow_pair.py): the acceptance is real, on held-out text, and so is the cost
of a step. All servers are up at once and take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import statistics
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tools import bench_server, ddtree_page, grow_pair, kernels, server
from tools.bench_server import Run

BUDGET = 32
# Deep enough that the GPU and not the host sets the pace, as in the models that this is for (27 to 61 layers).
LAYERS = 32
# Longer prompts are shared by several requests, each with an ending of its own, so that the prefix cache holds them.
DISTINCT_TOKENS, OWN_TOKENS, ANSWER_TOKENS = 300_000, 48, 512
FEW_TOKENS = 8
PROFILED = [(1, 32_768), (16, 32_768)]
# The first of them read the prompts.
PROFILED_STEPS = 24


def variants(pair: Path, contexts: list[int], batches: list[int]) -> dict[str, list[str]]:
    """Server flags by mode; the drafter reads the same last tokens in all that draft."""
    sizes = " ".join(map(str, sorted({*batches, *(bs for bs, _ in PROFILED)})))
    pool = max(*contexts, DISTINCT_TOKENS) + max(batches) * (OWN_TOKENS + ANSWER_TOKENS)
    common = shlex.split(
        f"--attention-backend sm120_mla --max-total-tokens {pool} --context-length {max(contexts) + 2000} "
        f"--max-running-requests {max(batches)} --mem-fraction-static 0.6 --cuda-graph-bs-decode {sizes}"
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


def prompts(text: list[int], context: int, batch: int) -> list[list[int]]:
    """Excerpts of `context` tokens; the text starts over where it is too short."""
    distinct = max(1, min(batch, DISTINCT_TOKENS // context))
    stream = itertools.cycle(text)
    shared = [list(itertools.islice(stream, context - OWN_TOKENS)) for _ in range(distinct)]
    own = [list(itertools.islice(stream, 311, 311 + OWN_TOKENS)) for _ in range(batch)]
    return [shared[i % distinct] + own[i] for i in range(batch)]


def prompts_of_many_lengths(text: list[int]) -> list[list[int]]:
    """For the comparison of greedy tokens."""
    lengths = [8, 33, 64, 100, 130, 200, 255, 300] * 2
    return [text[1000 * i : 1000 * i + length] for i, length in enumerate(lengths)]


def answer(up: server.Server, encoded: str, tokens: int) -> tuple[float, float, float]:
    """Seconds until the first and the last of the prompts, `encoded` as JSON, has `tokens`; mean steps of one."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = f'{{"input_ids": {encoded}, "sampling_params": {json.dumps(sampling)}}}'.encode()
    infos = [answer["meta_info"] for answer in up.post("/generate", body)]
    seconds = [info["e2e_latency"] for info in infos]
    steps = statistics.mean(info.get("spec_verify_ct", tokens - 1) for info in infos)
    return min(seconds), max(seconds), steps


def effort(batch_tokens: int) -> tuple[int, int]:
    """Tokens a request and repeats for a batch with this much context: its steps are slow where there is much."""
    if batch_tokens < 500_000:
        return 128, 4
    return (32, 3) if batch_tokens < 4_000_000 else (16, 2)


def first_and_last(up: server.Server, encoded: str, tokens: int) -> tuple[float, float]:
    """Seconds until the first and the last of the prompts has `tokens`."""
    return answer(up, encoded, tokens)[:2]


def decode(up: server.Server, encoded: str, batch_size: int, few: int, tokens: int) -> tuple[float, float]:
    """Tokens per second of the batch over `tokens` more than `few`, and committed tokens a step."""
    _, few_s, _ = answer(up, encoded, few)
    _, all_s, steps = answer(up, encoded, few + tokens)
    return batch_size * tokens / (all_s - few_s), (few + tokens - 1) / steps


def measure(run: Run, text: list[int], context: int, batch_size: int) -> None:
    """Append one row: medians of repeats that the modes take in turns."""
    encoded = json.dumps(prompts(text, context, batch_size))
    tokens, repeats = effort(context * batch_size)
    rates: dict[str, list[float]] = {mode: [] for mode in run.ups}
    row: dict[str, Any] = {"ctx": context, "bs": batch_size}
    few: dict[str, int] = {}
    for mode, up in run.ups.items():  # the adaptive one gets used to this text
        answer(up, encoded, FEW_TOKENS + tokens)
        few[mode] = bench_server.together(partial(first_and_last, up, encoded), FEW_TOKENS)
    for _ in range(repeats):
        for mode, up in run.ups.items():
            rate, row[f"{mode}_accept_len"] = decode(up, encoded, batch_size, few[mode], tokens)
            rates[mode].append(rate)
    for mode, of_mode in rates.items():
        row |= {f"{mode}_tok_s": statistics.median(of_mode), f"{mode}_repeats_tok_s": of_mode}
    print({k: round(v, 2) for k, v in row.items() if not isinstance(v, list)}, flush=True)
    run.results["rows"].append(row)
    run.save()


def profile(up: server.Server, text: list[int], batch_size: int, context: int, out: Path) -> None:
    """A torch profile of some decode steps, host and device, as `trace-bsN.json.gz`."""
    batch = prompts(text, context, batch_size)
    up.generate(batch, 2)
    folder = out / f"trace-bs{batch_size}"
    # Begun before the batch, which else may be done before the profiler has started.
    body = {"output_dir": str(folder), "num_steps": PROFILED_STEPS, "activities": ["CPU", "GPU"]}
    up.post_text("/start_profile", body | {"with_stack": False, "record_shapes": False})
    up.generate(batch, 400)
    time.sleep(2)  # the trace is written in the background
    (trace,) = folder.rglob("*.json.gz")
    trace.rename(out / f"trace-bs{batch_size}.json.gz")


def measure_all(run: Run, work: Path, contexts: list[int], batches: list[int]) -> None:
    """Serve the four modes, profile the tree, time every context and batch."""
    pair = grow_pair.grow(work / "pair", layers=LAYERS)
    text = grow_pair.held_out_tokens(pair)
    with ExitStack() as stack:
        run.launch(stack, pair / "target", variants(pair, contexts, batches))
        if not run.ups:
            raise SystemExit(f"error: no server started, so there is nothing to measure: see {run.out / 'logs'}")
        for batch_size, context in PROFILED:
            with run.attempt(f"profile of batch {batch_size}"):
                profile(run.ups["tree"], text, batch_size, context, run.out)
        pairs = [("none", mode) for mode in ("chain", "tree", "adaptive")]
        bench_server.compare(run, pairs, prompts_of_many_lengths(text))
        for context, batch_size in itertools.product(contexts, batches):
            if run.late():
                print(f"no time left for {context} x {batch_size} and what follows", flush=True)
                return
            with run.attempt(f"{context} tokens, batch {batch_size}"):
                measure(run, text, context, batch_size)
        run.save()


def main() -> None:
    """Run one of the verbs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results, traces and server logs")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the grown pair")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32_768, 185_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--minutes", type=float, default=60.0, help="no row is begun later than this")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verb == "render":
        ddtree_page.render(args.out, Path("docs/bench"))
    else:
        server.exit_on_sigterm()
        what = {"kernel_hash": kernels.source_hash(), "budget": BUDGET, "layers": LAYERS}
        results = what | {"rows": [], "equal": {}, "absent": {}}
        deadline = time.monotonic() + 60 * args.minutes
        measure_all(Run(args.out, deadline, results=results), args.work, args.contexts, args.batches)


if __name__ == "__main__":
    main()

"""DDTREE on one GPU: tokens per second of no speculation, chain, tree and adaptive width, and what a tree step costs.

    python -m tools.bench_ddtree run --out DIR       serve, time, profile; leaves JSON and traces in DIR, and goes on
                                                     where another run of the same kernels ended
    python -m tools.bench_ddtree render --out DIR    what that left as docs/bench/ddtree.{json,md,png}

The model is the trained pair, grown (tools/grow_pair.py): the acceptance is real, on held-out text, and so is the cost
of a step. The pair knows windows of 256 tokens: a prompt ends with some of held-out text, and what makes it longer is
filler that is read, but paid no attention to. All servers are up at once and take turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, harmonic_mean, median
from typing import Any

from tools import ddtree_page, greedy, grow_pair, kernels, server
from tools.bench_run import Run, ask_encoded, together
from tools.pair import held_out_tokens

BUDGET = 32
# Deep enough that the GPU and not the host sets the pace, as in the models that this is for (27 to 61 layers).
LAYERS = 32
# Longer prompts share their filler, so that the prefix cache holds it.
DISTINCT_TOKENS = 300_000
# Text of a request, and how much is answered before all of a batch are sure to run: with the answer no longer than what
# the pair was trained on, where that is enough.
TEXT_TOKENS, FEW_TOKENS, MOST_FEW_TOKENS = 96, 8, 128
# How much of an answer is timed, and of one whose steps are slow; and how many texts a row has at least, in batches of
# its size.
ANSWER_TOKENS, SLOW_ANSWER_TOKENS, TEXTS = 128, 64, 8
SLOW_BATCH_TOKENS = 2_000_000
# How often the modes take turns at each of a row's texts; where a batch is all of them, at that.
ROUNDS, ROUNDS_OF_ONE = 3, 10
# The adaptive width learns for so long before a row is measured, and for so many steps.
LEARNING_S, LEARNING_STEPS = 10.0, 120
EXCERPT_STRIDE = 997
REQUEST_TIMEOUT_S = 600  # a batch of long prompts may have to be read first
PROFILED = [(1, 32_768), (16, 32_768)]
# The first of them read the prompts; as many tokens as keep the batch running until the trace is whole.
PROFILED_STEPS, PROFILED_TOKENS = 24, 400


def variants(pair: Path, contexts: list[int], batches: list[int]) -> dict[str, list[str]]:
    """Server flags by mode; the drafter reads the same last tokens in all that draft.

    Metrics are what makes a server say when a prompt was done.
    """
    sizes = sorted({*batches, *(bs for bs, _ in PROFILED)})
    pool = max(*contexts, DISTINCT_TOKENS) + sizes[-1] * (TEXT_TOKENS + MOST_FEW_TOKENS + PROFILED_TOKENS)
    common = shlex.split(
        f"--attention-backend sm120_mla --max-total-tokens {pool} --context-length {max(contexts) + 2000} "
        f"--max-running-requests {sizes[-1]} --mem-fraction-static 0.6 "
        f"--cuda-graph-bs-decode {' '.join(map(str, sizes))} --enable-metrics"
    )
    draft = shlex.split(
        f"--speculative-draft-model-path {pair / 'drafter'} --speculative-draft-attention-backend triton "
        f"--speculative-draft-window-size {TEXT_TOKENS}"
    )
    tree = [*draft, "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(BUDGET)]
    return {
        "none": common,
        "chain": [*common, *draft, "--speculative-algorithm", "DFLASH"],
        "tree": [*common, *tree],
        "adaptive": [*common, *tree, "--speculative-ddtree-adaptive"],
    }


def prompts(text: list[int], context: int, batch: int, at: int = 0) -> list[list[int]]:
    """`batch` prompts of `context` tokens that end with excerpts of the text, the `at`-th and those after it."""
    distinct = max(1, min(batch, DISTINCT_TOKENS // context))
    fillers, filler_tokens = grow_pair.FILLERS, max(0, context - TEXT_TOKENS)
    batch_prompts = []
    for i in range(batch):
        kinds = fillers[i % distinct // len(fillers)], fillers[i % distinct % len(fillers)]
        begin = (at + i) * EXCERPT_STRIDE % (len(text) - TEXT_TOKENS)
        filler = [*kinds, *[fillers[0]] * filler_tokens][:filler_tokens]
        batch_prompts.append(filler + text[begin : begin + context - filler_tokens])
    return batch_prompts


def prompts_of_many_lengths(text: list[int]) -> list[list[int]]:
    """For the comparison of greedy tokens."""
    lengths = [8, 33, 64, 100, 130, 200, 255, 300] * 2
    return [text[1000 * i : 1000 * i + length] for i, length in enumerate(lengths)]


@dataclass(frozen=True)
class Answer:
    """What a request took: seconds since the last prompt of its batch was done, by the server's clock, and steps."""

    seconds: float
    steps: int


def answer(up: server.Server, encoded: str, tokens: int) -> list[Answer]:
    """The answers of so many tokens to prompts that are JSON already."""
    infos = ask_encoded(up, encoded, tokens, REQUEST_TIMEOUT_S)
    prompts_done = max(info["prefill_finished_time"] for info in infos)
    return [Answer(i["request_finished_ts"] - prompts_done, i.get("spec_verify_ct", tokens - 1)) for i in infos]


def first_and_last(up: server.Server, encoded: str, tokens: int) -> tuple[float, float]:
    """Seconds until the first and the last of the prompts has `tokens`."""
    seconds = [info["e2e_latency"] for info in ask_encoded(up, encoded, tokens, REQUEST_TIMEOUT_S)]
    return min(seconds), max(seconds)


def decoded(begun: list[list[Answer]], ended: list[Answer], tokens: int) -> tuple[float, float]:
    """Tokens per second of a batch while all of it runs, and tokens that a request commits a step.

    Over the `tokens` that answers have when `ended`, more than those of few tokens of the same batch have that are only
    `begun`. Requests commit unlike numbers a step and end one after the other; a step's time is taken until the first
    one ends.
    """
    few = [
        (median(one.seconds for one in ones), median(one.steps for one in ones)) for ones in zip(*begun, strict=True)
    ]
    steps = [after.steps - before for (_, before), after in zip(few, ended, strict=True)]
    first = min(range(len(ended)), key=lambda i: ended[i].seconds)
    step_s = (ended[first].seconds - few[first][0]) / steps[first]
    accepted = [tokens / count for count in steps]
    return sum(accepted) / step_s, fmean(accepted)


def learn(up: server.Server, encoded: list[str], few: int) -> list[float]:
    """Let the adaptive width get used to a row: tokens per second, prompts apart, as the texts are answered in turn."""
    end, steps, texts, rates = time.monotonic() + LEARNING_S, 0, itertools.cycle(encoded), []
    while time.monotonic() < end or steps < LEARNING_STEPS:
        asked = next(texts)
        begun, ended = (answer(up, asked, tokens) for tokens in (few, few + ANSWER_TOKENS))
        rates.append(decoded([begun], ended, ANSWER_TOKENS)[0])
        steps += min(answered.steps for answered in ended)
    return rates


def take_turns(
    run: Run, batch: str, few: dict[str, int], tokens: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """By mode, what `decoded` says of each round in which the modes answer a text.

    Answers of few tokens, only there to be taken off, are not asked for in every one of many rounds.
    """
    begun: dict[str, list[list[Answer]]] = {mode: [] for mode in run.ups}
    ended: dict[str, list[list[Answer]]] = {mode: [] for mode in run.ups}
    for nth in range(rounds):
        if nth > 0 and run.late():
            break
        for mode, up in run.ups.items():
            if nth < ROUNDS:
                begun[mode].append(answer(up, batch, few[mode]))
            ended[mode].append(answer(up, batch, few[mode] + tokens))
    return {mode: [decoded(begun[mode], one, tokens) for one in ended[mode]] for mode in run.ups}


def measure(run: Run, text: list[int], context: int, batch_size: int) -> None:
    """Append one row: of each text the median over rounds that the modes take in turns, of these the mean."""
    batches = range(0, max(TEXTS, batch_size), batch_size)
    encoded = [json.dumps(prompts(text, context, batch_size, at)) for at in batches]
    few: dict[str, int] = {}
    for mode, up in run.ups.items():
        answer(up, encoded[0], FEW_TOKENS)
        few[mode] = together(partial(first_and_last, up, encoded[0]), FEW_TOKENS, MOST_FEW_TOKENS)
    row: dict[str, Any] = {"ctx": context, "bs": batch_size}
    if "adaptive" in run.ups:
        row["learning_tok_s"] = learn(run.ups["adaptive"], encoded, few["adaptive"])
    rounds = ROUNDS if len(encoded) > 1 else ROUNDS_OF_ONE
    tokens = SLOW_ANSWER_TOKENS if context * batch_size > SLOW_BATCH_TOKENS else ANSWER_TOKENS
    texts = [take_turns(run, batch, few, tokens, rounds) for batch in encoded]
    for mode in run.ups:
        rates = [[rate for rate, _ in text[mode]] for text in texts]
        row |= {
            # The same tokens of each text: the mean that counts their time.
            f"{mode}_tok_s": harmonic_mean(map(median, rates)),
            f"{mode}_accept_len": harmonic_mean([one for text in texts for _, one in text[mode]]),
            f"{mode}_repeats_tok_s": rates,
        }
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
    up.generate(batch, PROFILED_TOKENS)
    time.sleep(2)  # the trace is written in the background
    (trace,) = folder.rglob("*.json.gz")
    trace.rename(out / f"trace-bs{batch_size}.json.gz")


def measure_all(run: Run, work: Path, contexts: list[int], batches: list[int]) -> None:
    """Serve the four modes, profile the tree, time every context and batch."""
    pair = grow_pair.grow(work / "pair", layers=LAYERS)
    text = held_out_tokens(pair / "target")
    with ExitStack() as stack:
        run.launch(stack, pair / "target", variants(pair, contexts, batches))
        if not run.ups:
            raise SystemExit(f"error: no server started, so there is nothing to measure: see {run.out / 'logs'}")
        if not run.results["equal"]:
            for batch_size, context in PROFILED:
                with run.attempt(f"profile of batch {batch_size}"):
                    profile(run.ups["tree"], text, batch_size, context, run.out)
            pairs = [("none", mode) for mode in ("chain", "tree", "adaptive")]
            greedy.compare(run, pairs, prompts_of_many_lengths(text))
        have = {(row["ctx"], row["bs"]) for row in run.results["rows"]}
        for batch_size, context in itertools.product(batches, contexts):
            if run.late():
                print(f"no time left for {context} x {batch_size} and what follows", flush=True)
                return
            if (context, batch_size) not in have:
                with run.attempt(f"{context} tokens, batch {batch_size}"):
                    measure(run, text, context, batch_size)
        run.save()


def so_far(out: Path) -> dict[str, Any]:
    """What an earlier run of the same kernels and sizes left in this folder, for this one to add to."""
    what = {"kernel_hash": kernels.source_hash(), "budget": BUDGET, "layers": LAYERS}
    path = out / "server-run.json"
    earlier = json.loads(path.read_text()) if path.exists() else {}
    is_same = what.items() <= earlier.items()
    kept = {key: earlier[key] for key in ("rows", "equal")} if is_same else {"rows": [], "equal": {}}
    return what | kept | {"absent": {}}


def main() -> None:
    """Run one of the verbs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results, traces and server logs")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the grown pair")
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32_768, 185_000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--minutes", type=float, default=60.0, help="no row and no round is begun later than this")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verb == "render":
        ddtree_page.render(args.out, Path("docs/bench"))
    else:
        deadline = time.monotonic() + 60 * args.minutes
        measure_all(Run(args.out, deadline, results=so_far(args.out)), args.work, args.contexts, args.batches)


if __name__ == "__main__":
    server.exit_on_signals()
    main()

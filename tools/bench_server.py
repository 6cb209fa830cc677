"""Servers on one or two GPUs, ours against stock SGLang, on a random Kimi-shaped model.

    python -m tools.bench_server run --out DIR [--gpus 2]   speed by context and batch, prompts, greedy tokens
    python -m tools.bench_server render --out DIR           what runs left in DIR as docs/bench/server.{json,md,png}

Stock is the same wheel with Triton attention. It gets FlashInfer's prefill where decode and verify are timed, for stock
Triton needs minutes for the prompts. All servers of a run are up at once and take turns; sleeping when idle keeps the
waiting ones from disturbing the timed one, and those that are only compared end before anything is timed. Servers of
one GPU share its part of the CPUs: a small model's step is as fast as its host, and that depends on where it runs.
Every context is a prefix of one long prompt, cached once a server; the requests of a batch differ in their last tokens.
Greedy tokens are compared on that model and on the trained pair (tools/grow_pair.py), whose choices are clear ones.
With two GPUs each takes one KV dtype, and tensor and data parallelism over both is compared with one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from tools import greedy, grow_pair, kernels, server, server_page, tiny_model
from tools.bench_run import OURS, REQUEST_TIMEOUT_S, SIMULATED_ACCEPT_LEN, Run, ask, ask_encoded, together
from tools.pair import held_out_tokens

STOCK = shlex.split(
    "--prefill-attention-backend flashinfer --decode-attention-backend triton --speculative-attention-mode decode"
)
BACKENDS = {"stock": STOCK, "ours": OURS}
EAGER = [*OURS, "--cuda-graph-backend-decode", "disabled"]
MODES = ("plain", "chain-q8", "chain-q16", "ddtree-q8", "ddtree-q16")
KV_DTYPES = ("auto", "fp8_e4m3")
# The drafter reads this much context on both sides: its own attention is upstream's and not what is compared.
DRAFT_WINDOW_TOKENS = 4096
REPEATS = PROMPT_REPEATS = 3
# Short steps, which move more, are taken so often within so many seconds.
MOST_REPEATS, ROW_S = 10, 15.0
# A step's time is a difference of two calls: one of few steps, and one of as many more as take about SPAN_S. A batch's
# requests arrive one after the other, so the few take so long that the first is not done before the last has come.
FEW_STEPS = 2
LEAST_STEPS, MOST_STEPS, SPAN_S = 4, 256, 0.3
SLOW_STEP_S = 0.15
TAIL_TOKENS = 16
# Of the 50 prompts that are answered greedily.
GREEDY_PROMPT_TOKENS = [1, 2, 7, 64, 65, 200, 511, 1000, 3000, 8000] * 4 + [12_000, 16_000] * 4 + [32_000, 31_999]
TRAINED_LAYERS, TREE_BUDGET = 8, 16


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """Random text tokens; a longer prompt of the same seed starts with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(3, tiny_model.VOCABULARY) for _ in range(tokens)]


def variants(args: argparse.Namespace, model: Path) -> dict[str, list[str]]:
    """Flags of every server of the speed table, by `who-mode-kv`; each GPU takes a KV dtype."""
    longest = max(args.contexts)
    # Metrics are what makes a server say when a prompt was done.
    pool = shlex.split(f"--max-total-tokens {longest + 115_000} --context-length {longest + 4000} --enable-metrics")
    flags = {}
    for who, mode, kv in itertools.product(BACKENDS, args.modes, args.kv_dtypes):
        if variant(who, mode, kv) != f"{who}-{mode}-{kv}":
            continue
        chain = []
        if mode != "plain":
            algorithm, q = mode.split("-q")
            drafter = tiny_model.write_drafter(args.work / f"drafter{q}", model, block_size=int(q))
            chain = [*chain_flags(drafter), "--speculative-draft-window-size", str(DRAFT_WINDOW_TOKENS)]
            if algorithm == "ddtree":  # of one candidate a position: the chain, by DDTREE's captured step
                chain += shlex.split("--speculative-algorithm DDTREE --speculative-ddtree-topk 1")
                chain += ["--speculative-ddtree-budget", str(int(q) - 1)]
        gpu = args.kv_dtypes.index(kv) % args.gpus
        flags[f"{who}-{mode}-{kv}"] = [
            *pool, *BACKENDS[who], *chain, "--kv-cache-dtype", kv, "--base-gpu-id", str(gpu),
        ]  # fmt: skip
    return flags


def variant(who: str, mode: str, kv: str) -> str:
    """The server that a row is measured on. Stock has no DDTREE: its chain is compared."""
    return f"{who}-{mode.replace('ddtree', 'chain') if who == 'stock' else mode}-{kv}"


def by_width(modes: Iterable[str]) -> list[list[str]]:
    """The modes in groups that one server of stock serves."""
    groups: dict[str, list[str]] = {}
    for mode in modes:
        groups.setdefault(variant("stock", mode, ""), []).append(mode)
    return list(groups.values())


def chain_flags(drafter: Path) -> list[str]:
    """DFLASH with Triton's attention for the drafter and its KV in bf16, whatever the target has."""
    return shlex.split(
        f"--speculative-algorithm DFLASH --speculative-draft-model-path {drafter} "
        "--speculative-draft-attention-backend triton --speculative-draft-kv-cache-dtype bfloat16"
    )


def time_prefill(run: Run, kv: str, begin: int = 32_768, end: int = 131_072) -> None:
    """Seconds from a cached prompt of `begin` tokens to one of `end`, ours and FlashInfer's own backend in turns."""
    ups = {who: run.ups[name] for who in BACKENDS if (name := f"{who}-plain-{kv}") in run.ups}
    seconds: dict[str, list[float]] = {who: [] for who in ups}
    with run.attempt(f"prompts, {kv}"):
        for repeat, (who, up) in itertools.product(range(PROMPT_REPEATS + 1), ups.items()):
            prompt = prompt_ids(1000 + repeat, end)
            ask(up, [prompt[:begin]], 1)
            (answer,) = ask(up, [prompt], 1)
            if repeat > 0:  # the first one compiles
                seconds[who].append(answer["meta_info"]["e2e_latency"])
            up.get("/flush_cache")
        row = {"kv_dtype": kv, "from": begin, "to": end}
        for who, column in (("stock", "flashinfer_s"), ("ours", "ours_s")):
            row[column] = statistics.median(seconds[who]) if who in seconds else None
        run.results["prefill"].append(row)
        print(row, flush=True)
        run.save()


def measure(run: Run, prompt: list[int], modes: list[str], ctx: int, bs: int, kv: str) -> None:
    """Append a row for each of the modes, which stock serves alike: medians of repeats that the servers take in turns.

    A step's time is taken from the end of the prompt, by the server's clock; a slow step is taken fewer times.
    """
    prompts = [prompt[: ctx - TAIL_TOKENS] + prompt_ids(ctx + 1 + i, TAIL_TOKENS) for i in range(bs)]
    encoded = json.dumps(prompts)
    sides = {mode: {who: variant(who, mode, kv) for who in BACKENDS} for mode in modes}
    names = [name for name in run.ups if any(name in side.values() for side in sides.values())]
    few = dict.fromkeys(names, FEW_STEPS)

    def run_steps(name: str, steps: int) -> list[dict[str, Any]]:
        """What the server says of each request that takes about so many steps."""
        tokens = steps * (SIMULATED_ACCEPT_LEN if "-chain-" in name else 1)
        return ask_encoded(run.ups[name], encoded, 1 + tokens, REQUEST_TIMEOUT_S)

    def seconds(name: str, steps: int) -> tuple[float, float]:
        """When the first and the last request are done, by the server's clock."""
        times = [meta["e2e_latency"] for meta in run_steps(name, steps)]
        return min(times), max(times)

    def step(name: str, steps: int) -> float:
        """Seconds of one of about `steps` that follow the first few."""
        (few_s, few_steps), (all_s, all_steps) = (decoded(run_steps(name, n)) for n in (few[name], few[name] + steps))
        return (all_s - few_s) / (all_steps - few_steps)

    more: dict[str, int] = {}
    samples: dict[str, list[float]] = {}
    for name in names:
        seconds(name, 1)  # caches the tails
        few[name] = together(partial(seconds, name), FEW_STEPS)
        step_s = step(name, LEAST_STEPS)
        more[name] = min(MOST_STEPS, max(LEAST_STEPS, round(SPAN_S / max(step_s, 1e-3))))
        samples[name] = [step_s] if step_s > SLOW_STEP_S else []
    end = time.monotonic() + ROW_S
    for nth in range(MOST_REPEATS):
        if nth >= REPEATS and time.monotonic() > end:
            break
        for name, taken in samples.items():
            if len(taken) < 2 or taken[0] < SLOW_STEP_S:
                taken.append(step(name, more[name]))
    medians_s = {name: statistics.median(taken) for name, taken in samples.items()}
    for mode, side in sides.items():
        if not any(name in medians_s for name in side.values()):
            continue
        per_step = 1 if mode == "plain" else SIMULATED_ACCEPT_LEN
        row: dict[str, Any] = {"mode": mode, "ctx": ctx, "bs": bs, "kv_dtype": kv, "kernel_hash": kernels.source_hash()}
        row["turns"] = min(len(samples[name]) for name in side.values() if name in samples)
        for who, name in side.items():
            median_s = medians_s.get(name)
            row[f"{who}_tok_s"] = median_s and bs * per_step / median_s
            row[f"{who}_step_ms"] = median_s and 1e3 * median_s
        print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        run.results["rows"].append(row)
    run.save()


def decoded(metas: list[dict[str, Any]]) -> tuple[float, int]:
    """Seconds from the end of a batch's prompts to its last token, and steps in between."""
    seconds = max(meta["request_finished_ts"] for meta in metas) - max(meta["prefill_finished_time"] for meta in metas)
    return seconds, max(meta.get("spec_verify_ct", meta["completion_tokens"] - 1) for meta in metas)


def measured(path: Path) -> set[tuple[Any, ...]]:
    """Rows of an earlier run that need not be taken again: of the present kernels, with both sides and no note."""
    rows = json.loads(path.read_text())["rows"]
    whole = [row for row in rows if row["stock_step_ms"] and row["ours_step_ms"] and not row.get("note")]
    return {_key(row) for row in whole if row["kernel_hash"] == kernels.source_hash()}


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["mode"], row["ctx"], row["bs"], row["kv_dtype"]


def speed(run: Run, args: argparse.Namespace) -> None:
    """Fill the rows that are not there yet, by batch size, until time is over; the GPUs side by side."""
    prompt = prompt_ids(0, max(args.contexts))
    have = measured(args.resume) if args.resume else set()

    def fill(gpu: int) -> None:
        mine = args.kv_dtypes[gpu :: args.gpus]
        for bs, kv, alike, ctx in itertools.product(args.batches, mine, by_width(args.modes), args.contexts):
            modes = [mode for mode in alike if (mode, ctx, bs, kv) not in have]
            if modes and not run.late():
                with run.attempt(f"{' and '.join(modes)}, {ctx} tokens, batch {bs}, {kv}"):
                    measure(run, prompt, modes, ctx, bs, kv)

    with ThreadPoolExecutor(args.gpus) as pool:
        try:
            list(pool.map(fill, range(args.gpus)))
        finally:
            run.deadline = time.monotonic()  # where SIGTERM ends the wait, no further row is begun


def cache_prompt(run: Run, names: list[str], prompt: list[int]) -> None:
    """Let every named server read the prompt."""

    def read(name: str) -> None:
        with run.attempt(f"the prompt of {name}"):
            ask(run.ups[name], [prompt], 1)

    with ThreadPoolExecutor(len(names) or 1) as pool:
        list(pool.map(read, names))


def equal_variants(args: argparse.Namespace, pair: Path) -> dict[str, list[str]]:
    """Servers that only answer greedily: both models on Triton and without graphs, the trained pair on two GPUs."""
    chain = chain_flags(pair / "drafter")
    tree = [*chain, "--speculative-algorithm", "DDTREE", "--speculative-ddtree-budget", str(TREE_BUDGET)]
    flags = {
        "trained-triton": ["--attention-backend", "triton"],
        "trained-stock": STOCK,
        "trained-ours": OURS,
        "trained-eager": EAGER,
        "trained-chain": [*OURS, *chain],
        "trained-tree": [*OURS, *tree],
        "trained-fp8": [*OURS, "--kv-cache-dtype", "fp8_e4m3"],
    }
    one_gpu = ["--base-gpu-id", str(args.gpus - 1)]
    flags = {name: [*more, *one_gpu] for name, more in flags.items()}
    if args.gpus > 1:
        # Plain NCCL: the fused and custom all-reduces may use NVLink multicast, which shared hosts switch off.
        nccl = ["--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion"]
        two = [*OURS, "--tp-size", "2", *nccl]
        data = ["--dp-size", "2", "--enable-dp-attention"]
        flags |= {"trained-tp2": two, "trained-tp2-chain": [*two, *chain], "trained-tp2-tree": [*two, *tree]}
        flags["trained-dp2"] = [*two, *data]
    pool = shlex.split("--max-total-tokens 100000 --context-length 40000 --enable-metrics")
    trained = [*pool, "--model-path", str(pair / "target")]
    random_model = {"triton": [*pool, "--attention-backend", "triton"], "eager": [*pool, *EAGER]}
    return random_model | {name: [*trained, *more] for name, more in flags.items()}


# The first of each is upstream on both sides, Triton's prefill and FlashInfer's: its noise is the others' yardstick.
RANDOM_PAIRS = [
    ("triton", "stock-plain-auto"),
    ("triton", "ours-plain-auto"),
    ("ours-plain-auto", "eager"),
    ("ours-plain-auto", "ours-plain-fp8_e4m3"),
    ("stock-plain-auto", "stock-plain-fp8_e4m3"),
]
TRAINED_PAIRS = [
    ("trained-triton", "trained-stock"),
    ("trained-triton", "trained-ours"),
    ("trained-ours", "trained-eager"),
    ("trained-ours", "trained-chain"),
    ("trained-ours", "trained-tree"),
    ("trained-ours", "trained-fp8"),
    ("trained-ours", "trained-tp2"),
    ("trained-tp2", "trained-tp2-chain"),
    ("trained-tp2", "trained-tp2-tree"),
    ("trained-ours", "trained-dp2"),
]


def compare_all(run: Run, pair: Path) -> None:
    """Both models. The random one's choices are close calls, so that only the trained one tells an error from noise."""
    text = held_out_tokens(pair / "target")
    assert len(text) > 997 * len(GREEDY_PROMPT_TOKENS) + max(GREEDY_PROMPT_TOKENS)

    def random_model() -> None:
        prompts = [prompt_ids(100 + i, tokens) for i, tokens in enumerate(GREEDY_PROMPT_TOKENS)]
        noise = greedy.compare(run, RANDOM_PAIRS, prompts, RANDOM_PAIRS[0])
        greedy.control(run, "ours-plain-auto", prompts, prompt_ids(500, max(GREEDY_PROMPT_TOKENS)), noise)

    def trained_model() -> None:
        prompts = [text[997 * i : 997 * i + tokens] for i, tokens in enumerate(GREEDY_PROMPT_TOKENS)]
        noise = greedy.compare(run, TRAINED_PAIRS, prompts, TRAINED_PAIRS[0])
        greedy.control(run, "trained-ours", prompts, text[::-1], noise)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(random_model), pool.submit(trained_model)]:
            done.result()


def keep_metrics(run: Run, names: Iterable[str]) -> None:
    """What servers of ours count: steps by path, splits, verify times, accept length, steps that left their graph."""
    for name in names:
        with run.attempt(f"metrics of {name}"):
            lines = run.ups[name].get("/metrics").splitlines()
            kept = [line for line in lines if line.startswith(("sm120:", "sglang:spec_accept_length"))]
            run.results["metrics"][name] = [line for line in kept if "_bucket" not in line]
    run.save()


def bench(run: Run, args: argparse.Namespace) -> None:
    """Prompts, greedy tokens, then the rows of the table."""
    model = tiny_model.write(args.work / "rank", size="rank")
    flags = variants(args, model)
    table = list(flags)
    if args.equal:
        pair = grow_pair.grow(args.work / "pair", layers=TRAINED_LAYERS)
        flags |= equal_variants(args, pair)
    with ExitStack() as stack:
        run.launch(stack, model, flags, args.gpus)
        run.save()
        if "plain" in args.modes:
            with ThreadPoolExecutor(args.gpus) as pool:
                list(pool.map(lambda kv: time_prefill(run, kv), args.kv_dtypes))
        cache_prompt(run, [name for name in table if name in run.ups], prompt_ids(0, max(args.contexts)))
        if args.equal:
            compare_all(run, pair)
            others = [name for name in run.ups if name not in table]
            keep_metrics(run, others)
            run.end(others)
        speed(run, args)
        run.save()


def main() -> None:
    """Run one of the verbs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and server logs")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the generated checkpoints")
    parser.add_argument("--gpus", type=int, default=1, choices=[1, 2])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 65536, 131072, 185000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 4], help="in the order of their importance")
    parser.add_argument("--kv-dtypes", nargs="+", default=KV_DTYPES, choices=KV_DTYPES)
    parser.add_argument("--equal", action=argparse.BooleanOptionalAction, default=True, help="compare greedy tokens")
    parser.add_argument("--resume", type=Path, help="server.json whose rows of the same kernels are left out")
    parser.add_argument("--budget-s", type=float, default=3600, help="start no row after this many seconds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verb == "render":
        server_page.render(args.out, Path("docs/bench"))
        return
    run = Run(args.out, time.monotonic() + args.budget_s)
    bench(run, args)


if __name__ == "__main__":
    server.exit_on_signals()
    main()

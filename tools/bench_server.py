"""Servers on the GPU, ours against stock SGLang, on a random Kimi-shaped model.

    python -m tools.bench_server run --out DIR      speed by context and batch, prompts, greedy tokens
    python -m tools.bench_server tp --out DIR       two GPUs: tensor and data parallel against one GPU, greedy tokens
    python -m tools.bench_server render --out DIR   what those left in DIR as docs/bench/server.{json,md,png}

Stock is the same wheel with Triton attention. It gets FlashInfer's prefill where decode and verify are timed, for stock
Triton needs minutes for the prompts. All servers of a run are up at once and take turns; sleeping when idle keeps the
waiting ones from disturbing the timed one. Every context is a prefix of one long prompt, cached once a server; the
requests of a batch differ in their last tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shlex
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import kernels, server, server_page, tiny_model

GPU_FLAGS = shlex.split(
    "--dtype bfloat16 --page-size 1 --disable-prefill-cuda-graph --skip-server-warmup --sampling-backend pytorch "
    "--sleep-on-idle --random-seed 1 --enable-metrics --max-running-requests 16 --chunked-prefill-size 8192 "
    "--mem-fraction-static 0.6 --cuda-graph-bs-decode 1 4 16"
)
STOCK = shlex.split(
    "--prefill-attention-backend flashinfer --decode-attention-backend triton --speculative-attention-mode decode"
)
OURS = ["--attention-backend", "sm120_mla"]
BACKENDS = {"stock": STOCK, "ours": OURS}
MODES = ("plain", "chain-q8", "chain-q16")
KV_DTYPES = ("auto", "fp8_e4m3")
SIMULATED_ACCEPT_LEN = 4
# The drafter reads this much context on both sides: its own attention is upstream's and not what is compared.
DRAFT_WINDOW_TOKENS = 4096
REPEATS = 3
SLOW_STEP_S = 0.1
SLOW_REPEATS = 2
TAIL_TOKENS = 16
REQUEST_TIMEOUT_S = 90


@dataclass
class Run:
    """Servers that are up, the results so far, and when to stop measuring."""

    out: Path
    deadline: float
    ups: dict[str, server.Server] = field(default_factory=dict)
    results: dict[str, Any] = field(
        default_factory=lambda: {"rows": [], "prefill": [], "equal": {}, "absent": {}, "metrics": {}}
    )

    def late(self) -> bool:
        """Whether the time for measuring is over."""
        return time.monotonic() > self.deadline

    def save(self) -> None:
        """Write what there is: a run that is cut short keeps it."""
        write_result(self.out / "server-run.json", self.results)

    def launch(self, stack: ExitStack, model: Path, variants: dict[str, list[str]]) -> None:
        """Start every variant at once. One that does not come up is noted under `absent` and left out."""

        def start(name: str) -> server.Server | RuntimeError:
            env = {"SGLANG_SIMULATE_ACC_LEN": str(SIMULATED_ACCEPT_LEN)} if "chain-q" in name else {}
            running = server.running(model, self.out / "logs" / f"{name}.log", variants[name], env, GPU_FLAGS)
            try:
                return stack.enter_context(running)
            except RuntimeError as error:
                return error

        begin = time.monotonic()
        with ThreadPoolExecutor(len(variants)) as pool:
            for name, up in zip(variants, pool.map(start, variants), strict=True):
                if isinstance(up, server.Server):
                    self.ups[name] = up
                else:
                    self.results["absent"][name] = str(up)
                    print(f"{name} did not start: {up}", flush=True)
        print(f"{len(self.ups)} servers ready after {time.monotonic() - begin:.0f} s", flush=True)


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """Random text tokens; a longer prompt of the same seed starts with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(tokens)]


def ask(up: server.Server, prompts: list[list[int]], new_tokens: int, **more: Any) -> list[dict[str, Any]]:
    """Greedy answers to prompts sent together."""
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    return up.post("/generate", {"input_ids": prompts, "sampling_params": sampling} | more, REQUEST_TIMEOUT_S)


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with what it was measured on."""
    import torch

    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "kernel_hash": kernels.source_hash()}
    path.write_text(json.dumps(where | result, indent=1) + "\n")


def variants(work: Path, model: Path, modes: list[str], kv_dtypes: list[str], longest: int) -> dict[str, list[str]]:
    """Flags of every server of the speed table, by `who-mode-kv`."""
    pool = shlex.split(f"--max-total-tokens {longest + 115_000} --context-length {longest + 1000}")
    flags = {}
    for who, mode, kv in itertools.product(BACKENDS, modes, kv_dtypes):
        chain = []
        if mode != "plain":
            q = int(mode.removeprefix("chain-q"))
            drafter = tiny_model.write_drafter(work / f"drafter{q}", model, block_size=q)
            chain = shlex.split(
                f"--speculative-algorithm DFLASH --speculative-draft-model-path {drafter} "
                f"--speculative-draft-attention-backend triton --speculative-draft-window-size {DRAFT_WINDOW_TOKENS}"
            )
        flags[f"{who}-{mode}-{kv}"] = [*pool, *BACKENDS[who], *chain, "--kv-cache-dtype", kv]
    return flags


def time_prefill(run: Run, kv: str, begin: int = 32_768, end: int = 131_072) -> None:
    """Seconds from a cached prompt of `begin` tokens to one of `end`, ours and FlashInfer's own backend in turns."""
    ups = {who: run.ups[name] for who in BACKENDS if (name := f"{who}-plain-{kv}") in run.ups}
    seconds: dict[str, list[float]] = {who: [] for who in ups}
    for repeat in range(REPEATS + 1):
        prompt = prompt_ids(1000 + repeat, end)
        for who, up in ups.items():
            ask(up, [prompt[:begin]], 1)
            start = time.perf_counter()
            ask(up, [prompt], 1)
            if repeat > 0:  # the first one compiles
                seconds[who].append(time.perf_counter() - start)
            up.get("/flush_cache")
    row = {"kv_dtype": kv, "from": begin, "to": end}
    row |= {f"{'flashinfer' if who == 'stock' else who}_s": statistics.median(times) for who, times in seconds.items()}
    run.results["prefill"].append(row)
    print(row, flush=True)
    run.save()


def decode_window(answers: list[dict[str, Any]]) -> tuple[float, int, int]:
    """Seconds, steps and new tokens of the time in which all requests of a batch decode: after the last prefill."""
    metas = [answer["meta_info"] for answer in answers]
    begin = max(meta["request_received_ts"] + meta["first_token_latency"] for meta in metas)
    end = max(meta["request_finished_ts"] for meta in metas)
    tokens = [meta["completion_tokens"] - 1 for meta in metas]
    steps = max(meta.get("spec_verify_ct", new) for meta, new in zip(metas, tokens, strict=True))
    return end - begin, steps, sum(tokens)


def measure(run: Run, prompt: list[int], mode: str, ctx: int, bs: int, kv: str) -> None:
    """Append one row: medians of repeats that stock and ours take in turns."""
    tails = [prompt_ids(ctx + 1 + i, TAIL_TOKENS) for i in range(bs)]
    prompts = [prompt[: ctx - TAIL_TOKENS] + tail for tail in tails]
    per_step = 1 if mode == "plain" else SIMULATED_ACCEPT_LEN
    ups = {who: run.ups[name] for who in BACKENDS if (name := f"{who}-{mode}-{kv}") in run.ups}
    step_s: dict[str, list[float]] = {}
    tokens_s: dict[str, list[float]] = {}
    steps: dict[str, int] = {}
    for who, up in ups.items():  # the first call compiles and caches the tails, the second says how long a step takes
        ask(up, prompts, 1 + per_step)
        seconds, taken, _ = decode_window(ask(up, prompts, 1 + 2 * per_step))
        step_s[who] = [seconds / taken]
        steps[who] = min(48, max(4, round(0.2 / step_s[who][0])))
    for repeat in range(REPEATS):
        for who, up in ups.items():
            if repeat < SLOW_REPEATS or step_s[who][0] < SLOW_STEP_S:
                seconds, taken, tokens = decode_window(ask(up, prompts, 1 + steps[who] * per_step))
                step_s[who].append(seconds / taken)
                tokens_s.setdefault(who, []).append(tokens / seconds)
    row: dict[str, Any] = {"mode": mode, "ctx": ctx, "bs": bs, "kv_dtype": kv}
    for who in BACKENDS:
        measured = who in ups
        row[f"{who}_tok_s"] = statistics.median(tokens_s[who]) if measured else None
        row[f"{who}_step_ms"] = 1e3 * statistics.median(step_s[who][1:]) if measured else None
    run.results["rows"].append(row)
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    run.save()


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return row["mode"], row["ctx"], row["bs"], row["kv_dtype"]


def resume(run: Run, path: Path) -> None:
    """Take over an earlier run's results; raises SystemExit if its kernels are not these."""
    earlier = json.loads(path.read_text())
    if earlier["kernel_hash"] != kernels.source_hash():
        raise SystemExit(f"error: {path} is of kernels {earlier['kernel_hash'][:12]}: run without --resume")
    for name in run.results:
        run.results[name] = earlier[name]


def speed(run: Run, modes: list[str], contexts: list[int], batches: list[int], kv_dtypes: list[str]) -> None:
    """Fill the rows that are not there yet, one batch size after the other, until time is over."""
    prompt = prompt_ids(0, max(contexts))
    with ThreadPoolExecutor(len(run.ups)) as pool:
        list(pool.map(lambda up: ask(up, [prompt], 1), run.ups.values()))
    have = {key(row) for row in run.results["rows"]}
    for bs, kv, mode, ctx in itertools.product(batches, kv_dtypes, modes, contexts):
        if (mode, ctx, bs, kv) not in have and not run.late():
            measure(run, prompt, mode, ctx, bs, kv)


def compare_greedy(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare greedy answers with top-2 log-probabilities.

    Noise is the largest difference of a chosen token's log-probability over the positions before any divergence. The
    first divergence of a prompt is a tie when the reference's top-2 gap there is at most twice the noise; the rest of
    that prompt follows another text and is not compared.
    """
    differences, divergences = [], []
    for prompt, (a, b) in enumerate(zip(want, got, strict=True)):
        pairs = zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True)
        for at, (left, right) in enumerate(pairs):
            if left[1] != right[1]:
                top = a["meta_info"]["output_top_logprobs"][at]
                divergences.append({"prompt": prompt, "at": at, "gap": top[0][0] - top[1][0]})
                break
            differences.append(abs(left[0] - right[0]))
    noise = max(differences)
    errors = [d for d in divergences if d["gap"] > 2 * noise]
    return {
        "prompts": len(want),
        "positions": len(differences),
        "noise": noise,
        "mean": statistics.fmean(differences),
        "identical": len(want) - len(divergences),
        "ties": len(divergences) - len(errors),
        "errors": errors,
    }


def greedy_prompts() -> list[list[int]]:
    """50 prompts of 1 to 32,000 tokens."""
    lengths = [1, 2, 7, 64, 65, 200, 511, 1000, 3000, 8000] * 4 + [12_000, 16_000] * 4 + [32_000, 31_999]
    return [prompt_ids(100 + i, n) for i, n in enumerate(lengths)]


def greedy(up: server.Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """32 greedy tokens of each prompt, one prompt after the other, with the top two log-probabilities."""
    return [ask(up, [prompt], 32, return_logprob=True, top_logprobs_num=2)[0] for prompt in prompts]


def compare(run: Run, pairs: list[tuple[str, str]], prompts: list[list[int]]) -> None:
    """Greedy answers of all servers named in `pairs` (reference, other), asked side by side, compared pair by pair."""
    names = [name for name in dict.fromkeys(itertools.chain(*pairs)) if name in run.ups]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = dict(zip(names, pool.map(lambda name: greedy(run.ups[name], prompts), names), strict=True))
    for reference, other in pairs:
        if reference in answers and other in answers:
            found = compare_greedy(answers[reference], answers[other])
            run.results["equal"][f"{other} against {reference}"] = found
            print(f"{other} against {reference}: {found}", flush=True)
    run.save()


EQUAL_SERVERS = {
    "triton": ["--attention-backend", "triton"],
    "ours-eager": [*OURS, "--cuda-graph-backend-decode", "disabled"],
}
EQUAL_PAIRS = [
    ("triton", "ours-plain-auto"),
    ("triton", "stock-plain-auto"),
    ("ours-plain-auto", "ours-eager"),
    ("ours-plain-auto", "ours-plain-fp8_e4m3"),
    ("stock-plain-auto", "stock-plain-fp8_e4m3"),
]


def keep_metrics(run: Run) -> None:
    """What our servers count: steps by path, splits, verify times, accept length, steps that left their graph."""
    for name, up in run.ups.items():
        lines = [line for line in up.get("/metrics").splitlines() if line.startswith(("sm120:", "sglang:spec_accept"))]
        run.results["metrics"][name] = [line for line in lines if "_bucket" not in line]
    run.save()


def one_gpu(run: Run, args: argparse.Namespace) -> None:
    """Prompts, the first batch size's rows, greedy tokens, then the other batch sizes' rows."""
    model = tiny_model.write(args.work / "rank", size="rank")
    flags = variants(args.work, model, args.modes, args.kv_dtypes, max(args.contexts))
    if args.equal:
        pool = shlex.split("--max-total-tokens 100000 --context-length 40000")
        flags |= {name: [*pool, *more] for name, more in EQUAL_SERVERS.items()}
    with ExitStack() as stack:
        run.launch(stack, model, flags)
        if "plain" in args.modes and not run.results["prefill"]:
            for kv in args.kv_dtypes:
                time_prefill(run, kv)
        first, *others = args.batches
        speed(run, args.modes, args.contexts, [first], args.kv_dtypes)
        if args.equal and not run.late():
            compare(run, EQUAL_PAIRS, greedy_prompts())
        speed(run, args.modes, args.contexts, others, args.kv_dtypes)
        keep_metrics(run)


def two_gpus(run: Run, args: argparse.Namespace) -> None:
    """Greedy tokens of one GPU against two: tensor parallel, plain and chain, and data-parallel attention."""
    model = tiny_model.write(args.work / "rank", size="rank")
    drafter = tiny_model.write_drafter(args.work / "drafter8", model, block_size=8)
    pool = shlex.split("--max-total-tokens 100000 --context-length 40000 --disable-custom-all-reduce")
    chain = shlex.split(
        f"--speculative-algorithm DFLASH --speculative-draft-model-path {drafter} "
        "--speculative-draft-attention-backend triton"
    )
    two = ["--tp-size", "2"]
    flags = {
        "one": [],
        "one-chain": chain,
        "tp2": two,
        "tp2-chain": [*two, *chain],
        "dp2": [*two, "--dp-size", "2", "--enable-dp-attention"],
    }
    pairs = [("one", "one-chain"), ("one", "tp2"), ("one-chain", "tp2-chain"), ("tp2", "tp2-chain"), ("one", "dp2")]
    with ExitStack() as stack:
        run.launch(stack, model, {name: [*pool, *OURS, *more] for name, more in flags.items()})
        compare(run, pairs, greedy_prompts())
        keep_metrics(run)


def main() -> None:
    """Run one of the verbs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "tp", "render"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and server logs")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the generated checkpoints")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 65536, 131072, 185000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 4], help="in the order of their importance")
    parser.add_argument("--kv-dtypes", nargs="+", default=KV_DTYPES, choices=KV_DTYPES)
    parser.add_argument("--equal", action=argparse.BooleanOptionalAction, default=True, help="compare greedy tokens")
    parser.add_argument("--resume", type=Path, help="results of an earlier run on the same kernels, to be completed")
    parser.add_argument("--budget-s", type=float, default=3600, help="start no row after this many seconds")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verb == "render":
        server_page.render(args.out, Path("docs/bench"))
        return
    run = Run(args.out, time.monotonic() + args.budget_s)
    if args.resume:
        resume(run, args.resume)
    (one_gpu if args.verb == "run" else two_gpus)(run, args)


if __name__ == "__main__":
    main()

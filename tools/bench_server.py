"""Servers on one GPU: ours against stock SGLang on a random Kimi-shaped model.

    python -m tools.bench_server equal --out DIR     greedy tokens: ours against Triton, graphs against eager
    python -m tools.bench_server speed --out DIR     tokens per second by context and batch, plain and DFLASH chain
    python -m tools.bench_server render --out DIR    what the first two left in DIR as docs/bench/server.{json,md,png}

Stock is the same wheel with Triton attention. It gets FlashInfer's prefill where only decode and verify are timed,
for stock Triton needs minutes for the prompts. All servers of a comparison are up at once and take turns; sleeping when
idle keeps the waiting one from disturbing the timed one.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tools import kernels, server, tiny_model

GPU_FLAGS = shlex.split(
    "--dtype bfloat16 --page-size 1 --disable-prefill-cuda-graph --skip-server-warmup --sampling-backend pytorch "
    "--sleep-on-idle --random-seed 1"
)
TRITON_DECODE = shlex.split(
    "--prefill-attention-backend flashinfer --decode-attention-backend triton --speculative-attention-mode decode"
)
OURS = ["--attention-backend", "sm120_mla"]
SIMULATED_ACCEPT_LEN = 4
REPEATS = 3
# The drafter reads this much context on both sides: its own attention is upstream's and not what is compared.
DRAFT_WINDOW_TOKENS = 4096


def launch(stack: ExitStack, model: Path, log_dir: Path, variants: dict[str, list[str]]) -> dict[str, server.Server]:
    """Start every variant at once; returns name -> server."""

    def start(name: str) -> server.Server:
        env = {"SGLANG_SIMULATE_ACC_LEN": str(SIMULATED_ACCEPT_LEN)} if "chain" in name else {}
        running = server.running(model, log_dir / f"{name}.log", variants[name], env, GPU_FLAGS)
        return stack.enter_context(running)

    with ThreadPoolExecutor(len(variants)) as pool:
        return dict(zip(variants, pool.map(start, variants), strict=True))


def prompt_ids(seed: int, tokens: int) -> list[int]:
    """Random text tokens; a longer prompt of the same seed starts with the shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(3, 2048) for _ in range(tokens)]


def compare_greedy(want: list[dict[str, Any]], got: list[dict[str, Any]]) -> dict[str, Any]:
    """Compare greedy answers with top-2 log-probabilities.

    Noise is the largest difference of a chosen token's log-probability over the positions before any divergence. The
    first divergence of a prompt is a tie when the reference's top-2 gap there is at most twice the noise; the rest of
    that prompt follows another text and is not compared.
    """
    noise, compared, divergences = 0.0, 0, []
    for prompt, (a, b) in enumerate(zip(want, got, strict=True)):
        pairs = zip(a["meta_info"]["output_token_logprobs"], b["meta_info"]["output_token_logprobs"], strict=True)
        for at, (left, right) in enumerate(pairs):
            if left[1] != right[1]:
                top = a["meta_info"]["output_top_logprobs"][at]
                divergences.append({"prompt": prompt, "at": at, "gap": top[0][0] - top[1][0]})
                break
            noise = max(noise, abs(left[0] - right[0]))
            compared += 1
    errors = [d for d in divergences if d["gap"] > 2 * noise]
    ties = len(divergences) - len(errors)
    return {
        "positions": compared,
        "noise": noise,
        "identical": len(want) - len(divergences),
        "ties": ties,
        "errors": errors,
    }


def equal(out: Path, work: Path, left_out: list[str]) -> None:
    """50 prompts to 32k tokens through Triton and FlashInfer, ours with graphs, eager and fp8 KV; write `equal.json`.

    Triton against FlashInfer shows what two stock backends differ by on the same prompts.
    """
    model = tiny_model.write(work / "rank", size="rank")
    pool = shlex.split(
        "--max-total-tokens 400000 --context-length 40000 --max-running-requests 16 --mem-fraction-static 0.15"
    )
    graphs = ["--cuda-graph-max-bs-decode", "8"]
    variants = {
        "triton": [*pool, *graphs, "--attention-backend", "triton"],
        "flashinfer": [*pool, *graphs, "--attention-backend", "flashinfer"],
        "ours": [*pool, *graphs, *OURS],
        "ours-eager": [*pool, *OURS, "--cuda-graph-backend-decode", "disabled"],
        "ours-fp8": [*pool, *graphs, *OURS, "--kv-cache-dtype", "fp8_e4m3"],
    }
    lengths = [1, 2, 7, 64, 65, 200, 511, 1000, 3000, 8000] * 4 + [12_000, 16_000] * 4 + [32_000, 31_999]
    prompts = [prompt_ids(100 + i, n) for i, n in enumerate(lengths)]
    answers: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        asked_for = {name: flags for name, flags in variants.items() if name not in left_out}
        for name, up in launch(stack, model, out, asked_for).items():
            parameters = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
            answers[name] = []
            for prompt in prompts:
                body = {
                    "input_ids": prompt,
                    "sampling_params": parameters,
                    "return_logprob": True,
                    "top_logprobs_num": 2,
                }
                answers[name].append(up.post("/generate", body))
            print(f"{name}: {len(prompts)} prompts answered", flush=True)
    pairs = [("triton", "ours"), ("triton", "flashinfer"), ("ours", "ours-fp8"), ("ours", "ours-eager")]
    result: dict[str, Any] = {"prompts": len(prompts)}
    for reference, name in pairs:
        if name in answers:
            result[f"{name} against {reference}"] = compare_greedy(answers[reference], answers[name])
    write_result(out / "equal.json", result)
    print(json.dumps(result, indent=2))


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result with what it was measured on."""
    import torch

    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "kernel_hash": kernels.source_hash()}
    path.write_text(json.dumps(where | result, indent=1) + "\n")


def render(results: Path, docs: Path) -> None:
    """Collect `equal.json` and `speed-*.json` of `results` into `server.json`, `server.md` and `server.png` in `docs`.

    Raises SystemExit if they are of different kernels: one page speaks of one set of sources.
    """
    parts = [json.loads(path.read_text()) for path in sorted(results.glob("*.json"))]
    where = {key: {part.pop(key) for part in parts} for key in ("gpu", "torch", "kernel_hash")}
    if any(len(values) != 1 for values in where.values()):
        raise SystemExit(f"error: {results} mixes runs ({where}): keep the files of one run")
    page = {key: values.pop() for key, values in where.items()}
    page["rows"] = [row for part in parts for row in part.get("rows", [])]
    page["equal"] = {key: value for part in parts for key, value in part.items() if key != "rows"}
    (docs / "server.json").write_text(json.dumps(page, indent=1) + "\n")
    (docs / "server.md").write_text(_markdown(page))
    _plot(page, docs / "server.png")


def _markdown(page: dict[str, Any]) -> str:
    lines = [
        "# The server, ours against stock",
        "",
        f"One {page['gpu']}, torch {page['torch']}, kernel sources {page['kernel_hash'][:12]}. A random Kimi-shaped",
        "model: 8 layers, 8 heads (one TP-8 rank), latent 512 + 64, MoE; bf16, page size 1, CUDA graphs, overlap",
        f"scheduling on. Chain rows: DFLASH with {SIMULATED_ACCEPT_LEN} tokens a step (set, for the drafter is",
        f"random) and a draft window of {DRAFT_WINDOW_TOKENS} tokens on both sides. Medians of {REPEATS} interleaved",
        "repeats; stock decodes and verifies with Triton. Made by `python -m tools.bench_server`.",
        "",
        "| mode | context | batch | KV | stock tok/s | ours tok/s | stock ms a step | ours ms a step | stock / ours |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in page["rows"]:
        ratio = row["stock_step_ms"] / row["ours_step_ms"]
        lines.append(
            f"| {row['mode']} | {row['ctx']:,} | {row['bs']} | {row['kv_dtype']} | {row['stock_tok_s']:,.0f} "
            f"| {row['ours_tok_s']:,.0f} | {row['stock_step_ms']:.2f} | {row['ours_step_ms']:.2f} | {ratio:.1f} |"
        )
    lines += ["", "![tokens per second by context](server.png)", "", "## Greedy tokens", ""]
    lines += [f"{page['equal'].pop('prompts', 0)} prompts of 1 to 32,000 tokens, 32 new tokens each.", ""]
    lines += [*(compare_greedy.__doc__ or "").strip().replace("\n    ", "\n").splitlines(), ""]
    lines += ["| pair | identical | ties | errors | noise, nats |", "|---|---|---|---|---|"]
    for pair, found in page["equal"].items():
        counts = f"{found['identical']} | {found['ties']} | {len(found['errors'])}"
        lines.append(f"| {pair} | {counts} | {found['noise']:.3f} |")
    return "\n".join(lines) + "\n"


def _plot(page: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for (mode, bs), style in zip(sorted({(r["mode"], r["bs"]) for r in page["rows"]}), "os^vD*", strict=False):
        rows = [r for r in page["rows"] if (r["mode"], r["bs"]) == (mode, bs)]
        for who, line in (("ours", "-"), ("stock", "--")):
            points = [r[f"{who}_tok_s"] for r in rows]
            axes.plot([r["ctx"] for r in rows], points, style + line, label=f"{who}, {mode}, batch {bs}")
    axes.set(xscale="log", yscale="log", xlabel="context, tokens", ylabel="tokens per second", title=page["gpu"])
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def step_time(up: server.Server, prompts: list[list[int]], few: int, many: int) -> float:
    """Seconds for `many - few` more tokens of every prompt; the prompts are cached, both calls share the rest."""
    times = []
    for tokens in (few, many):
        begin = time.perf_counter()
        up.generate(prompts, tokens)
        times.append(time.perf_counter() - begin)
    return times[1] - times[0]


def speed(
    out: Path, work: Path, modes: list[str], contexts: list[int], batches: list[int], q: int, kv_dtype: str
) -> None:
    """Time every (context, batch) on stock and ours, plain or with a chain verify of width q, to `speed-*.json`."""
    model = tiny_model.write(work / "rank", size="rank")
    drafter = tiny_model.write_drafter(work / f"drafter{q}", model, block_size=q)
    tokens = max(contexts) * 4 + 100_000
    pool = shlex.split(
        f"--max-total-tokens {tokens} --context-length {max(contexts) + 1000} --max-running-requests 16 "
        f"--mem-fraction-static 0.2 --cuda-graph-bs-decode 1 4 16 --chunked-prefill-size 8192 "
        f"--kv-cache-dtype {kv_dtype}"
    )
    chain = shlex.split(
        f"--speculative-algorithm DFLASH --speculative-draft-model-path {drafter} "
        f"--speculative-draft-attention-backend triton --speculative-draft-window-size {DRAFT_WINDOW_TOKENS}"
    )
    speculation = {"plain": [], "chain": chain}
    variants = {
        f"{who}-{mode}": [*pool, *backend, *speculation[mode]]
        for mode in modes
        for who, backend in (("stock", TRITON_DECODE), ("ours", OURS))
    }
    rows = []
    with ExitStack() as stack:
        begin = time.monotonic()
        ups = launch(stack, model, out, variants)
        print(f"{len(ups)} servers ready after {time.monotonic() - begin:.0f} s", flush=True)
        for ctx in contexts:
            for bs in (b for b in batches if b * ctx <= tokens - 60_000):
                prompts = [prompt_ids(i, ctx) for i in range(bs)]
                for mode in modes:
                    rows.append(measure(ups, mode, prompts, ctx, bs, q, kv_dtype))
                    write_result(out / f"speed-q{q}-{kv_dtype}.json", {"rows": rows})


def measure(
    ups: dict[str, server.Server], mode: str, prompts: list[list[int]], ctx: int, bs: int, q: int, kv_dtype: str
) -> dict[str, Any]:
    """One row: median of interleaved repeats on stock and ours."""
    steps = 16
    per_step = SIMULATED_ACCEPT_LEN if mode == "chain" else 1
    seconds: dict[str, list[float]] = {"stock": [], "ours": []}
    for who in seconds:  # fills the prefix cache and warms up
        ups[f"{who}-{mode}"].generate(prompts, per_step)
    for _ in range(REPEATS):
        for who, times in seconds.items():
            times.append(step_time(ups[f"{who}-{mode}"], prompts, per_step, per_step * (steps + 1)))
    stock, ours = (statistics.median(seconds[who]) for who in ("stock", "ours"))
    row = {
        "mode": mode if mode == "plain" else f"chain-q{q}",
        "ctx": ctx,
        "bs": bs,
        "kv_dtype": kv_dtype,
        "stock_tok_s": per_step * steps * bs / stock,
        "ours_tok_s": per_step * steps * bs / ours,
        "stock_step_ms": 1e3 * stock / steps,
        "ours_step_ms": 1e3 * ours / steps,
    }
    print({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return row


def main() -> None:
    """Run one of the verbs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["equal", "speed", "render"])
    parser.add_argument("--out", type=Path, required=True, help="folder for results and server logs")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="folder for the generated checkpoints")
    parser.add_argument("--leave-out", nargs="+", default=[], choices=["flashinfer", "ours-eager", "ours-fp8"])
    parser.add_argument("--modes", nargs="+", default=["plain", "chain"], choices=["plain", "chain"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 65536, 131072, 185000])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--q", type=int, default=16, help="draft block width, which is the verify width of the chain")
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "fp8_e4m3"])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.verb == "render":
        render(args.out, Path("docs/bench"))
    elif args.verb == "equal":
        equal(args.out, args.work, args.leave_out)
    else:
        speed(args.out, args.work, args.modes, args.contexts, args.batches, args.q, args.kv_dtype)


if __name__ == "__main__":
    main()

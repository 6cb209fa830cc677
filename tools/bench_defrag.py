"""What defragmentation is worth: `python -m tools.bench_defrag PART [--out FILE]`, PART being all or one of these.

    churn        replays one trace with upstream's allocator and with extents; runs anywhere
    map          compacts a churned pool to the end: runs, and kv-map.png beside the file; runs anywhere
    kernel       attention bandwidth against contiguity (needs a CUDA GPU and the kernel library, not SGLang)
    move         bandwidth of the move that compaction launches (as kernel)
    compaction   what one whole pass over a churned pool costs (needs a CUDA GPU)
    serve        tokens a second with tiers off, 0, and 0 with 1 (needs a CUDA GPU)

Every comparison is of medians within one run; results are merged into the JSON file under the name of the part.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

from tools.churn import World

EXTENTS = (0, 64, 128, 256)
GPU_PARTS = ("kernel", "move", "compaction", "serve")
SERVE_FLAGS = (
    "--dtype bfloat16 --page-size 1 --disable-prefill-cuda-graph --skip-server-warmup --sampling-backend pytorch "
    "--max-total-tokens 200000 --context-length 16000 --max-running-requests 32 --cuda-graph-max-bs-decode 32 "
    "--enable-metrics --mem-fraction-static 0.4"
)


@dataclass(frozen=True)
class Trace:
    """Poisson arrivals of prompts with lognormal lengths, half of them behind one of `shared_prefixes`."""

    pool_tokens: int = 65_536
    max_requests: int = 32
    steps: int = 2_500
    arrivals_per_step: float = 0.12
    shared_prefixes: int = 8
    shared_tokens: int = 512
    prompt_median_tokens: int = 500
    output_mean_tokens: int = 300
    seed: int = 0


def replay(trace: Trace, extent_tokens: int, verify_block: int, device: str) -> dict[str, float]:
    """Run the trace once: time-averaged mean run length and contiguity, and host microseconds of allocation a step."""
    world = World(
        trace.pool_tokens,
        max_requests=trace.max_requests,
        max_context=8_192,
        verify_block=verify_block,
        extent_tokens=extent_tokens,
        device=device,
        seed=trace.seed,
        with_kv=False,
    )
    random = Random(trace.seed)
    prefixes = [[random.randrange(50) for _ in range(trace.shared_tokens)] for _ in range(trace.shared_prefixes)]
    waiting: list[tuple[list[int], int]] = []
    units = runs = 0
    for step in range(trace.steps):
        for _ in range(_poisson(random, trace.arrivals_per_step)):
            length = min(int(random.lognormvariate(0, 0.8) * trace.prompt_median_tokens) + 1, 4_000)
            prefix = random.choice(prefixes) if random.random() < 0.5 else []
            prompt = prefix + [random.randrange(50) for _ in range(length)]
            waiting.append((prompt, min(int(random.expovariate(1 / trace.output_mean_tokens)) + 1, 2_000)))
        while waiting and world.arrive(*waiting[0]):
            waiting.pop(0)
        world.step()
        if step % 50 == 49 and step > trace.steps // 4:
            total = world.survey_runs()
            units, runs = units + total.units, runs + total.runs
    return {
        "mean_run_length": units / runs,
        "contiguity": 1 - (runs - 1) / (units - 1),
        "alloc_us_per_step": world.cost.seconds / world.cost.steps * 1e6,
        "requests": world.count,
    }


def _poisson(random: Random, mean: float) -> int:
    arrivals, left = 0, random.expovariate(1)
    while left < mean:
        arrivals, left = arrivals + 1, left + random.expovariate(1)
    return arrivals


def churn(device: str, repeats: int = 3, trace: Trace | None = None) -> dict:
    """Stock against extents, with and without speculation; the variants take turns within each repeat."""
    trace = trace or Trace()
    cases = []
    for verify_block in (0, 8):
        results: dict[int, list[dict]] = {extent: [] for extent in EXTENTS}
        for _ in range(repeats):
            for extent in EXTENTS:
                results[extent].append(replay(trace, extent, verify_block, device))
        medians = {
            extent: {key: statistics.median(r[key] for r in rows) for key in rows[0]}
            for extent, rows in results.items()
        }
        for extent, row in medians.items():
            case = {"verify_block": verify_block, "extent_tokens": extent} | row
            case["run_length_ratio"] = row["mean_run_length"] / medians[0]["mean_run_length"]
            case["alloc_time_ratio"] = row["alloc_us_per_step"] / medians[0]["alloc_us_per_step"]
            cases.append(case)
            print(json.dumps(case), flush=True)
    return {"trace": asdict(trace), "device": device, "repeats": repeats, "cases": cases}


def draw_map(device: str, picture: Path) -> dict[str, float]:
    """Compact a churned pool of upstream's allocator until no pass gains, and draw it before and after."""
    from sglang_sm120.kvdefrag import kv_map, serving

    world = churned(device, 65_536)
    before, maps, passes = world.survey_runs(), [kv_map.owners(world.survey())], 0
    while world.compact(serving.WINDOW_UNITS, 4 * serving.WINDOW_UNITS):
        passes += 1
    after = world.survey_runs()
    picture.parent.mkdir(parents=True, exist_ok=True)
    kv_map.draw([*maps, kv_map.owners(world.survey())]).save(picture)
    result: dict[str, float] = {"passes": passes, "units_a_pass": 4 * serving.WINDOW_UNITS}
    for name, runs in (("before", before), ("after", after)):
        result |= {f"mean_run_length_{name}": runs.mean_length, f"contiguity_{name}": runs.contiguity}
    print(json.dumps(result), flush=True)
    return result


def kernel(tokens: int = 131_072, heads: int = 8, q_len: int = 17) -> dict:
    """Attention time on one long request whose slots lie in runs of one length, page size 1, and in 64-token pages."""
    from sglang_sm120 import ops

    pool_slots = 4 * tokens
    pool = torch.randn(pool_slots, ops.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(q_len, heads, ops.HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows, lens = torch.zeros(1, dtype=torch.int64, device="cuda"), torch.tensor([tokens], device="cuda")
    cases = []
    for run in (1, 2, 4, 8, 16, 32, 64, 256, 1_024, 4_096, tokens):
        starts = torch.randperm(pool_slots // run, device="cuda")[: tokens // run] * run
        table = (starts[:, None] + torch.arange(run, device="cuda")).view(1, -1).int()

        def attend(table: torch.Tensor = table) -> None:
            ops.mla_verify(q, pool, table, rows, lens, q_len=q_len, sm_scale=0.1)

        ms = median_ms(attend)
        runs = len(starts)
        case = {
            "run_length": run,
            "contiguity": 1 - (runs - 1) / (tokens - 1),
            "page_size": 64 if run == 64 else 1,
            "ms": ms,
            "gb_per_s": tokens * ops.HEAD_DIM * 2 / ms / 1e6,
        }
        cases.append(case)
        print(json.dumps(case), flush=True)
    return {"tokens": tokens, "heads": heads, "q_len": q_len, "kv": "bfloat16", "cases": cases}


def move(layers: int = 61, slots: int = 73_728) -> dict:
    """Bandwidth of the move that compaction launches, by window, against a plain copy on the device."""
    from sglang_sm120 import ops

    buffers = [torch.randn(slots, ops.HEAD_DIM, device="cuda").bfloat16() for _ in range(layers)]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    row_bytes = ops.HEAD_DIM * 2
    copied = [torch.empty_like(buffer) for buffer in buffers]
    copy_ms = median_ms(lambda: [a.copy_(b) for a, b in zip(copied, buffers, strict=True)])
    moved_bytes = 2 * slots * row_bytes * layers  # read and written
    cases = []
    for window in (384, 768, 1_536, 3_072, 6_144):
        base = torch.arange(slots // window, device="cuda")[:, None] * window
        src = base + torch.stack([torch.randperm(window, device="cuda") for _ in range(len(base))])
        dst = base + torch.arange(window, device="cuda")

        def permute(src: torch.Tensor = src, dst: torch.Tensor = dst) -> None:
            for a, b in zip(src, dst, strict=True):
                ops.move_kv(pointers, row_bytes, a, b)

        ms = median_ms(permute)
        case = {"window_units": window, "ms": ms, "gb_per_s": moved_bytes / ms / 1e6, "of_copy_rate": copy_ms / ms}
        cases.append(case)
        print(json.dumps(case), flush=True)
    return {"layers": layers, "slots": slots, "copy_gb_per_s": moved_bytes / copy_ms / 1e6, "cases": cases}


def compaction(layers: int = 61, slots: int = 262_144) -> dict[str, float]:
    """Milliseconds of one whole pass at the default budget over a churned pool, survey and rewriting included."""
    from sglang_sm120.kvdefrag import compactor, serving
    from sglang_sm120.kvdefrag.settings import Settings

    buffers = [torch.zeros(slots + 1, 1, 576, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    pool = compactor.Pool(buffers, page_size=1)
    budget = int(Settings().compact_ms / 1000 * serving.move_bytes_per_s("cuda") / (2 * pool.unit_bytes))
    world = churned("cuda", slots)
    stages: dict[str, list[float]] = {"survey_ms": [], "plan_ms": [], "commit_ms": []}
    before = world.survey_runs()
    for _ in range(12):
        marks = [_now()]
        survey = world.survey()
        marks.append(_now())
        moves = compactor.plan(survey, serving.WINDOW_UNITS, budget)
        marks.append(_now())
        if moves is None:
            break
        compactor.commit(survey, moves, [pool])
        marks.append(_now())
        for name, begin, end in zip(stages, marks, marks[1:], strict=False):
            stages[name].append((end - begin) * 1000)
    after = world.survey_runs()
    medians = {name: statistics.median(times) for name, times in stages.items()}
    return medians | {
        "passes": len(stages["commit_ms"]),
        "budget_units": budget,
        "total_ms": sum(medians.values()),
        "mean_run_length_before": before.mean_length,
        "mean_run_length_after": after.mean_length,
    }


def churned(device: str, size: int) -> World:
    """Upstream's allocator after enough arrivals and departures to scatter everything."""
    world = World(size, max_requests=32, max_context=8_192, device=device, with_kv=False)
    random = Random(0)
    for _ in range(1_200):
        if random.random() < 0.15:
            prompt = [random.randrange(50) for _ in range(random.randint(100, 3_000))]
            world.arrive(prompt, random.randint(50, 800))
        world.step()
    return world


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def median_ms(call: Callable[[], object], repeats: int = 21) -> float:
    """Median GPU milliseconds of `call`; 256 MB are written before each, so that no cache holds what it reads."""
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def serve(requests: int = 160, arrivals_per_s: float = 12.0) -> dict:
    """Output tokens a second and time per output token under Poisson arrivals: tiers off, 0, and 0 with 1."""
    from tools import server, tiny_model

    work = Path("build/bench-defrag")
    model = tiny_model.write(work / "rank", size="rank")
    tiers = {
        "off": {},
        "0": {"SGLANG_SM120_KV_EXTENT": "256"},
        "0+1": {"SGLANG_SM120_KV_EXTENT": "256", "SGLANG_SM120_KV_COMPACT": "auto"},
    }
    cases = []
    for name, env in tiers.items():
        flags = [*SERVE_FLAGS.split(), "--attention-backend", "sm120_mla"]
        with server.running(model, work / f"{name}.log", flags, env, defaults=()) as up:
            offer(up.generate, requests // 4, arrivals_per_s)  # warm up
            case = {"tiers": name} | offer(up.generate, requests, arrivals_per_s)
            state = json.loads(up.get("/server_info"))["internal_states"][0].get("sm120_kv", {})
            case |= {key: state.get(key) for key in ("passes", "units_moved", "contiguity", "refused_because")}
        cases.append(case)
        print(json.dumps(case), flush=True)
    return {"requests": requests, "arrivals_per_s": arrivals_per_s, "flags": SERVE_FLAGS, "cases": cases}


def offer(generate: Callable[..., list[dict]], requests: int, arrivals_per_s: float) -> dict[str, float]:
    """Send requests at Poisson times; tokens a second, and the median and 99th percentile of time per output token."""
    random = Random(0)
    shared = [[random.randrange(3, 2_000) for _ in range(2_000)] for _ in range(4)]

    def one(delay_s: float, prompt: list[int], tokens: int) -> tuple[int, float]:
        time.sleep(delay_s)
        begin = time.perf_counter()
        generate([prompt], tokens)
        return tokens, (time.perf_counter() - begin) / tokens

    at, jobs = 0.0, []
    for _ in range(requests):
        at += random.expovariate(arrivals_per_s)
        prefix = random.choice(shared) if random.random() < 0.5 else []
        prompt = prefix + [random.randrange(3, 2_000) for _ in range(random.randint(200, 6_000))]
        jobs.append((at, prompt, random.randint(50, 400)))
    begin = time.perf_counter()
    with ThreadPoolExecutor(requests) as pool:
        done = list(pool.map(lambda job: one(*job), jobs))
    seconds = time.perf_counter() - begin
    per_token = sorted(ms for _, ms in done)
    return {
        "tokens_per_s": sum(tokens for tokens, _ in done) / seconds,
        "median_ms_per_token": statistics.median(per_token) * 1000,
        "p99_ms_per_token": per_token[int(0.99 * len(per_token))] * 1000,
    }


def machine() -> dict[str, str]:
    """What it ran on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "gpu": f"{gpu.name}, sm_{gpu.major}{gpu.minor}" if gpu else "none",
        "cpu": platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run a part, or all that this machine can, and merge its results into the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["churn", "map", *GPU_PARTS, "all"])
    parser.add_argument("--out", type=Path, default=Path("docs/bench/defrag.json"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and arguments.part in GPU_PARTS:
        parser.error(f"{arguments.part} needs a CUDA GPU; churn and map run without")
    picture = arguments.out.with_name("kv-map.png")
    parts = {
        "churn": lambda: churn(device),
        "map": lambda: draw_map(device, picture),
        "kernel": kernel,
        "move": move,
        "compaction": compaction,
        "serve": serve,
    }
    everything = list(parts) if device == "cuda" else ["churn", "map"]
    wanted = everything if arguments.part == "all" else [arguments.part]
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for part in wanted:
        name = f"{part} on {device}" if part == "churn" else part
        results[name] = {"machine": machine()} | parts[part]()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What defragmentation is worth: `python -m tools.bench_defrag churn|kernel|compact|all [--out FILE]`.

`churn` replays one trace with upstream's allocator and with extents, and runs anywhere. `kernel` and `compact` need a
CUDA GPU and the kernel library: attention bandwidth against contiguity, and the bandwidth and the pauses of compaction.
Every comparison is of medians within one run; results are merged into the JSON file under the name of the part.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch

from tools.churn import World

EXTENTS = (0, 64, 128, 256)


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

        ms = median_ms(attend, flush_l2=True)
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


def compact(layers: int = 61, slots: int = 65_536, row_values: int = 576) -> dict:
    """Bandwidth of the move that compaction launches, window by window, against a plain device copy of as many bytes."""
    from sglang_sm120.kvdefrag.compactor import Pool

    buffers = [torch.randn(slots, 1, row_values, device="cuda").bfloat16() for _ in range(layers)]
    pool = Pool(buffers, page_size=1)
    (launch,) = pool.launches()
    moved_bytes = 2 * row_values * 2 * layers  # read and written, a slot
    copied = torch.empty_like(buffers[0])
    copy_ms = median_ms(lambda: copied.copy_(buffers[1]), flush_l2=True)
    copy_gb_per_s = 2 * buffers[0].numel() * 2 / copy_ms / 1e6
    cases = []
    for window in (256, 512, 1_024, 2_048, 4_096):
        base = torch.arange(slots // window, device="cuda")[:, None] * window
        order = torch.stack([torch.randperm(window, device="cuda") for _ in range(len(base))])
        src, dst = base + order, base + torch.arange(window, device="cuda")

        def move(src: torch.Tensor = src, dst: torch.Tensor = dst) -> None:
            for a, b in zip(src, dst, strict=True):
                launch(a, b)

        ms = median_ms(move, flush_l2=True)
        rate = slots * moved_bytes / ms / 1e6
        case = {"window_units": window, "ms": ms, "gb_per_s": rate, "of_copy_rate": rate / copy_gb_per_s}
        cases.append(case)
        print(json.dumps(case), flush=True)
    return {"layers": layers, "slots": slots, "copy_gb_per_s": copy_gb_per_s, "cases": cases, "pass": a_pass(buffers)}


def a_pass(buffers: list[torch.Tensor]) -> dict[str, float]:
    """Host milliseconds of one whole pass at the default budget over a churned pool, survey and rewriting included."""
    from sglang_sm120.kvdefrag import compactor, serving
    from sglang_sm120.kvdefrag.settings import Settings

    pool = compactor.Pool(buffers, page_size=1)
    budget = int(Settings().compact_ms / 1000 * serving.move_bytes_per_s("cuda") / (2 * pool.unit_bytes))
    world = churned("cuda", len(buffers[0]) - 1)
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


def median_ms(call: Callable[[], None], flush_l2: bool, repeats: int = 21) -> float:
    """Median GPU milliseconds of `call`; with `flush_l2`, 256 MB are written before each."""
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(repeats + 3):
        if flush_l2:
            scratch.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


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
    parser.add_argument("part", choices=["churn", "kernel", "compact", "all"])
    parser.add_argument("--out", type=Path, default=Path("docs/bench/defrag.json"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and arguments.part in ("kernel", "compact"):
        parser.error(f"{arguments.part} needs a CUDA GPU; churn runs without")
    parts = {"churn": lambda: churn(device), "kernel": kernel, "compact": compact}
    wanted = [arguments.part] if arguments.part != "all" else [p for p in parts if p == "churn" or device == "cuda"]
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for part in wanted:
        name = f"{part} on {device}" if part == "churn" else part
        results[name] = {"machine": machine()} | parts[part]()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What defragmentation is worth: `python -m tools.bench_defrag PART [--out FILE]`, PART being all or one of these.

    churn        replays one trace with upstream's allocator and with extents; runs anywhere
    map          compacts a churned pool to the end: runs, and kv-map.png beside the file; runs anywhere
    kernel       attention bandwidth against contiguity (needs a CUDA GPU and the kernel library, not SGLang)
    fastpath     what the kernel would win if it read no indices where KV is contiguous (as kernel; builds one)
    move         bandwidth of the move that compaction launches (as kernel)
    compaction   what whole passes over a churned pool cost (needs a CUDA GPU)
    steps        decode step times while compacting and not (needs a CUDA GPU)
    serve        tokens a second with tiers off, 0, 1, and 0 with 1 (needs a CUDA GPU)
    render       defrag.png from the results of kernel and move

Every comparison is of medians within one run; results are merged into the JSON file under the name of the part.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from tools import server
from tools.churn import World

EXTENTS = (0, 64, 128, 256)
GPU_PARTS = ("kernel", "fastpath", "move", "compaction", "steps", "serve")
HEAD_DIM = 576
HEADS = 8
RUN_LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1_024, 4_096, 131_072)
# How the kernel's loader finds a slot, and how it would if a request's KV were one run.
INDEXED = "ptx::cp_async_4(slot_ring + to * kSlotBatchBytes, slots + min(at, length - 1));"
CONTIGUOUS = """asm volatile("st.shared.u32 [%0], %1;" ::"r"(slot_ring + to * kSlotBatchBytes),
                 "r"(slots[0] + min(at, length - 1)) : "memory");
    __syncwarp();"""
# Name of the tiers that are on: tokens of an extent, and whether compaction runs.
TIERS = {"off": ("0", False), "0": ("256", False), "1": ("0", True), "0+1": ("256", True)}
SERVE_FLAGS = (
    "--dtype bfloat16 --page-size 1 --disable-prefill-cuda-graph --skip-server-warmup --sampling-backend pytorch "
    "--max-total-tokens 200000 --context-length 16000 --max-running-requests 32 --cuda-graph-bs-decode 8 16 24 32 "
    "--sleep-on-idle --enable-metrics --mem-fraction-static 0.6"
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


def churn(device: str, repeats: int = 7, trace: Trace | None = None) -> dict:
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
    before, maps, passes = world.survey_runs(), [world.owners()], 0
    while world.compact(serving.WINDOW_UNITS, 4 * serving.WINDOW_UNITS):
        passes += 1
    after = world.survey_runs()
    picture.parent.mkdir(parents=True, exist_ok=True)
    kv_map.draw([*maps, world.owners()]).save(picture)
    result: dict[str, float] = {"passes": passes, "units_a_pass": 4 * serving.WINDOW_UNITS}
    for name, runs in (("before", before), ("after", after)):
        result |= {f"mean_run_length_{name}": runs.mean_length, f"contiguity_{name}": runs.contiguity}
    print(json.dumps(result), flush=True)
    return result


def kernel(repeats: int = 3) -> dict:
    """Attention time against contiguity, page sizes 1 and 64: one long request, decoding and verifying, and a batch.

    Slots lie in runs of one length, at random places of a pool four times as large. A table of 64-token pages at some
    contiguity is a table of slots in longer runs, which is all that the kernel sees of it.
    """
    tokens = 131_072
    pool = torch.randn(4 * tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cases = []
    for batch, q_len in ((1, 1), (1, 17), (32, 1)):
        length = tokens // batch
        tables = {run: _table(pool.shape[0], batch, length, run) for run in RUN_LENGTHS if run <= length}
        times: dict[int, list[float]] = {run: [] for run in tables}
        for _ in range(repeats):
            for run, table in tables.items():
                times[run].append(median_ms(_attention(pool, table, q_len)))
        for run, table in tables.items():
            runs, pages = table.shape[1] // run, table.shape[1] // 64
            ms = statistics.median(times[run])
            case = {
                "requests": batch,
                "q_len": q_len,
                "run_length": run,
                "contiguity_page_1": 1 - (runs - 1) / (length - 1),
                "contiguity_page_64": 1 - (runs - 1) / (pages - 1) if run >= 64 else None,
                "ms": ms,
                "gb_per_s": tokens * HEAD_DIM * 2 / ms / 1e6,
            }
            cases.append(case)
            print(json.dumps(case), flush=True)
    return {"tokens": tokens, "heads": HEADS, "kv": "bfloat16", "repeats": repeats, "cases": cases}


def _table(pool_slots: int, batch: int, length: int, run: int) -> torch.Tensor:
    """A `req_to_token [batch, length]` whose slots lie in runs of `run`, at random places."""
    starts = torch.randperm(pool_slots // run, device="cuda")[: batch * length // run] * run
    return (starts[:, None] + torch.arange(run, device="cuda")).view(batch, length).int()


def _attention(pool: torch.Tensor, table: torch.Tensor, q_len: int) -> Callable[[], object]:
    """One call of the kernel: every row of the table is a request that asks `q_len` queries."""
    from sglang_sm120 import ops

    batch, length = table.shape
    q = torch.randn(batch * q_len, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.arange(batch, device="cuda")
    lens = torch.full((batch,), length, device="cuda")
    return lambda: ops.mla_verify(q, pool, table, rows, lens, q_len=q_len, sm_scale=0.1)


def fastpath(repeats: int = 5) -> dict:
    """What reading no indices would win: the kernel against itself with slots computed from a request's first one.

    On contiguous KV both read the same bytes. The second kernel is built here, from the sources with one line changed.
    """
    from sglang_sm120 import ops

    from tools import kernels

    major, minor = torch.cuda.get_device_capability()
    sources = Path(shutil.copytree(kernels.SOURCES, "build/contiguous", dirs_exist_ok=True)).resolve()
    loader = sources / "mla_verify" / "kernel.cuh"
    text = loader.read_text()
    if text.count(INDEXED) != 1:
        raise SystemExit(f"error: {loader} does not read slots by `{INDEXED}`: tell tools/bench_defrag.py how it does")
    loader.write_text(text.replace(INDEXED, CONTIGUOUS))
    library = kernels.build([f"sm_{major}{minor}"], sources / "lib", sources=sources)
    paths = {"indices": ops.LIBRARY_PATH, "contiguous": library}

    tokens = 131_072
    pool = torch.randn(tokens, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    cases = []
    for batch, q_len in ((1, 1), (1, 17), (32, 1)):
        table = torch.arange(tokens, device="cuda", dtype=torch.int32).view(batch, -1)
        attend = _attention(pool, table, q_len)
        times: dict[str, list[float]] = {name: [] for name in paths}
        for _ in range(repeats):
            for name, path in paths.items():
                ops.LIBRARY_PATH = path
                ops._library.cache_clear()
                times[name].append(median_ms(attend))
        ms = {name: statistics.median(values) for name, values in times.items()}
        cases.append({"requests": batch, "q_len": q_len, "ms": ms, "gain": ms["indices"] / ms["contiguous"] - 1})
        print(json.dumps(cases[-1]), flush=True)
    ops.LIBRARY_PATH = paths["indices"]
    ops._library.cache_clear()
    return {"tokens": tokens, "cases": cases}


def move(layers: int = 61, slots: int = 73_728) -> dict:
    """Bandwidth of the move that compaction launches, by window, against a plain copy on the device."""
    from sglang_sm120 import ops

    buffers = [torch.randn(slots, HEAD_DIM, device="cuda").bfloat16() for _ in range(layers)]
    pointers = torch.tensor([buffer.data_ptr() for buffer in buffers], device="cuda")
    row_bytes = HEAD_DIM * 2
    copied = [torch.empty_like(buffer) for buffer in buffers]
    copy_ms = median_ms(lambda: [a.copy_(b) for a, b in zip(copied, buffers, strict=True)])
    moved_bytes = 2 * slots * row_bytes * layers  # read and written
    cases = []
    for window in (384, 768, 1_536, 3_072, 6_144):
        base = torch.arange(slots // window, device="cuda")[:, None] * window
        src = base + torch.stack([torch.randperm(window, device="cuda") for _ in range(len(base))])
        dst = base + torch.arange(window, device="cuda")

        ms = median_ms(partial(ops.move_kv, pointers, row_bytes, src, dst.contiguous()))
        case = {"window_units": window, "ms": ms, "gb_per_s": moved_bytes / ms / 1e6, "of_copy_rate": copy_ms / ms}
        cases.append(case)
        print(json.dumps(case), flush=True)
    return {"layers": layers, "slots": slots, "copy_gb_per_s": moved_bytes / copy_ms / 1e6, "cases": cases}


def compaction(layers: int = 61, slots: int = 262_144) -> dict:
    """Whole passes at the default budget over a churned pool: milliseconds, and the bandwidth of the move."""
    from sglang_sm120.kvdefrag import compactor, serving
    from sglang_sm120.kvdefrag.settings import Settings

    buffers = [torch.zeros(slots + 1, 1, HEAD_DIM, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    pool = compactor.Pool(buffers, page_size=1)
    copy_ms = median_ms(lambda: [a.copy_(b) for a, b in zip(buffers[::2], buffers[1::2], strict=False)])
    copy_rate = 2 * (layers // 2) * buffers[0].nbytes / copy_ms
    budget = int(Settings().compact_ms / 1000 * serving.move_bytes_per_s("cuda") / (2 * pool.unit_bytes))
    world = churned("cuda", slots)
    before = world.survey_runs()
    passes: list[dict[str, float]] = []
    while len(passes) < 40:
        stages = {name: torch.cuda.Event(enable_timing=True) for name in ("pool 0 part 0 chunk 0", "rows")}
        marks = [_now()]
        survey = world.survey()
        marks.append(_now())
        moves = compactor.plan(survey, serving.WINDOW_UNITS, budget)
        marks.append(_now())
        if moves is None:
            break
        compactor.commit(survey, moves, [pool], partial(_record, stages))
        marks.append(_now())
        units = sum(src.numel() for src, _ in moves.chunks)
        begin, end = stages.values()
        move_ms = begin.elapsed_time(end)
        passes.append({
            "survey_ms": (marks[1] - marks[0]) * 1000,
            "plan_ms": (marks[2] - marks[1]) * 1000,
            "commit_ms": (marks[3] - marks[2]) * 1000,
            "move_ms": move_ms,
            "total_ms": (marks[3] - marks[0]) * 1000,
            "units": units,
            "move_gb_per_s": 2 * units * pool.unit_bytes / move_ms / 1e6,
            "of_copy_rate": 2 * units * pool.unit_bytes / move_ms / copy_rate,
        })  # fmt: skip
    after = world.survey_runs()
    result = {
        "layers": layers,
        "pool_tokens": slots,
        "budget_units": budget,
        "passes": len(passes),
        "copy_gb_per_s": copy_rate / 1e6,
        "median": {key: statistics.median(p[key] for p in passes) for key in passes[0]},
        "first": passes[0],
        "mean_run_length_before": before.mean_length,
        "mean_run_length_after": after.mean_length,
        "contiguity_before": before.contiguity,
        "contiguity_after": after.contiguity,
    }
    print(json.dumps(result), flush=True)
    return result


def steps(layers: int = 61, requests: int = 32, tokens: int = 4_096, count: int = 320, repeats: int = 3) -> dict:
    """Milliseconds of decode steps while tier 1 compacts at its default budget, and while it does not.

    A step is upstream's allocation and the attention of all layers, in a CUDA graph. The pool is upstream's, so it
    scatters; the threshold is 1, so every look, one in 64 steps, is followed by a pass.
    """
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang_sm120 import ops
    from sglang_sm120.kvdefrag import serving
    from sglang_sm120.kvdefrag.settings import Settings, When

    slots = 262_144
    world = World(slots, max_requests=requests, max_context=8_192, device="cuda", with_kv=False)
    pool = MLATokenToKVPool(
        size=slots, page_size=1, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=layers,
        device="cuda", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in pool.kv_buffer:
        buffer.normal_()
    world.allocator._kvcache = pool
    random = Random(0)
    for _ in range(requests):
        world.arrive([random.randrange(50) for _ in range(tokens)], 1 << 20)
    tier_1 = serving.Defragmenter(world.scheduler(), Settings(compact=When.AUTO, compact_below=1.0))

    q = torch.randn(requests, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.tensor([req.kv.req_pool_idx for req in world.running], device="cuda")
    lens = torch.full((requests,), tokens, device="cuda")

    def attend() -> None:
        for buffer in pool.kv_buffer:
            ops.mla_verify(q, buffer.view(-1, HEAD_DIM), world.rows.req_to_token, rows, lens, q_len=1, sm_scale=0.1)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()

    def step(compacting: bool) -> float:
        begin = _now()
        if compacting and tier_1.due():
            tier_1.run_pass()
        world.step()
        lens.add_(1)
        graph.replay()
        return (_now() - begin) * 1000

    times: dict[str, list[float]] = {"off": [], "on": []}
    for _ in range(128):
        step(compacting=True)  # loads what a pass launches
    passes = tier_1.report()["passes"]
    for _ in range(repeats):
        for name, values in times.items():
            values.extend(step(name == "on") for _ in range(count))
    result = {
        "layers": layers,
        "requests": requests,
        "steps": repeats * count,
        "passes": tier_1.report()["passes"] - passes,
        "off": _step_summary(times["off"]),
        "on": _step_summary(times["on"]),
        "mean_rise": statistics.mean(times["on"]) / statistics.mean(times["off"]) - 1,
    }
    print(json.dumps(result), flush=True)
    return result


def _step_summary(milliseconds: Sequence[float]) -> dict[str, float]:
    times = sorted(milliseconds)
    at = {f"p{percent}_ms": times[int(percent / 100 * len(times))] for percent in (50, 95, 98, 99)}
    return {"mean_ms": statistics.mean(times)} | at | {"longest_ms": times[-1]}


def _record(events: dict[str, torch.cuda.Event], stage: str) -> None:
    if stage in events:
        events[stage].record()


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
    """Median GPU milliseconds of `call`; 1 GB is written before each: no cache holds what it reads, and the
    host has launched all of it when the GPU begins."""
    scratch = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
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


def serve(requests: int = 48, arrivals_per_s: float = 16.0, repeats: int = 2) -> dict:
    """Poisson traffic with tiers off, 0, 1, and 0 with 1, taking turns; then step times with tier 1 off and on.

    One server has upstream's allocator and one has extents; both have tier 1, and a request stops and starts it. Each
    turn begins with an empty pool and is measured once that has filled up.
    """
    from tools import tiny_model

    work = Path("build/bench-defrag")
    model = work / "rank"
    if not (model / "config.json").exists():
        tiny_model.write(model, size="rank")

    def start(extent: str) -> server.Server:
        flags = [*SERVE_FLAGS.split(), "--attention-backend", "sm120_mla"]
        env = {"SGLANG_SM120_KV_COMPACT": "auto", "SGLANG_SM120_KV_EXTENT": extent}
        return stack.enter_context(server.running(model, work / f"extent{extent}.log", flags, env, defaults=()))

    offers: dict[str, list[dict[str, float]]] = {name: [] for name in TIERS}
    steps: dict[str, list[dict[str, float]]] = {"off": [], "1": []}
    with ExitStack() as stack:
        extents = sorted({extent for extent, _ in TIERS.values()})
        with ThreadPoolExecutor(len(extents)) as pool:
            ups = dict(zip(extents, pool.map(start, extents), strict=True))
        print("servers are up", flush=True)
        for seed in range(repeats):
            for name, results in offers.items():
                up = ups[TIERS[name][0]]
                _set_tier_1(up, TIERS[name][1])
                offer(up.generate, 2 * requests // 3, arrivals_per_s, 100 + seed)
                before = _compaction_state(up)
                results.append(offer(up.generate, requests, arrivals_per_s, seed) | _since(before, up))
                print(json.dumps({"tiers": name} | results[-1]), flush=True)
        for seed in range(repeats + 1):
            for name, results in steps.items():
                up = ups[TIERS[name][0]]
                _set_tier_1(up, TIERS[name][1])
                before = _compaction_state(up)
                results.append(step_times(up, seed) | _since(before, up))
                print(json.dumps({"steps of": name} | results[-1]), flush=True)
    return {
        "requests": requests,
        "arrivals_per_s": arrivals_per_s,
        "repeats": repeats,
        "flags": SERVE_FLAGS,
        "cases": [{"tiers": name} | _medians(rows) for name, rows in offers.items()],
        "steps": {name: _medians(rows) for name, rows in steps.items()},
    }


def _set_tier_1(up: server.Server, on: bool) -> None:
    """Empty the pool and the prefix cache, and start or stop compaction."""
    up.post("/set_internal_state", {"server_args": {"sm120_kv_compact": int(on)}})
    urllib.request.urlopen(urllib.request.Request(f"{up.url}/flush_cache?timeout=30", method="POST")).close()


def _compaction_state(up: server.Server) -> dict[str, Any]:
    return json.loads(up.get("/server_info"))["internal_states"][0]["sm120_kv"]


def _since(before: dict[str, Any], up: server.Server) -> dict[str, float]:
    """Passes, units moved and host milliseconds of a pass between two states."""
    now = _compaction_state(up)
    if now["refused_because"]:
        raise SystemExit(f"error: compaction was refused: {now['refused_because']}")
    passes, units, seconds = (now[key] - before[key] for key in ("passes", "units_moved", "host_seconds"))
    return {"passes": passes, "units_moved": units, "host_ms_a_pass": seconds / passes * 1000 if passes else 0.0}


def _medians(rows: list[dict[str, float]]) -> dict[str, Any]:
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]} | {"repeats": rows}


def offer(generate: Callable[..., list[dict]], requests: int, arrivals_per_s: float, seed: int) -> dict[str, float]:
    """Send requests at Poisson times; tokens a second, and the median and 99th percentile of time per output token."""
    random = Random(seed)
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


def step_times(up: server.Server, seed: int, requests: int = 32, steps: int = 700) -> dict[str, float]:
    """Milliseconds between the tokens that one request streams while it decodes beside `requests - 1` others."""
    random = Random(1_000 + seed)
    prompts = [[random.randrange(3, 2_000) for _ in range(256)] for _ in range(requests)]
    with ThreadPoolExecutor(1) as pool:
        others = pool.submit(up.generate, prompts[1:], steps + 100)
        arrivals = list(_token_times(up, prompts[0], steps))
        others.result()
    return _step_summary([(b - a) * 1000 for a, b in pairwise(arrivals[50:])])  # by then all have started


def _token_times(up: server.Server, prompt: list[int], tokens: int) -> Iterator[float]:
    """When each token of a streamed answer arrives."""
    parameters = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": parameters, "stream": True}).encode()
    request = urllib.request.Request(f"{up.url}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter()


def render(results: dict[str, Any], docs: Path) -> None:
    """Draw `defrag.png` beside the JSON file: attention by contiguity, and the move by window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    page_1, page_64, moves = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    cases, tokens = results["kernel"]["cases"], results["kernel"]["tokens"]
    for batch, q_len in dict.fromkeys((case["requests"], case["q_len"]) for case in cases):
        rows = [case for case in cases if (case["requests"], case["q_len"]) == (batch, q_len)]
        for axes, page in ((page_1, 1), (page_64, 64)):
            at = [row for row in rows if row[f"contiguity_page_{page}"] is not None]
            scattered = at[0]["gb_per_s"]
            axes.plot(
                [row[f"contiguity_page_{page}"] for row in at],
                [row["gb_per_s"] / scattered for row in at],
                "o-",
                label=f"{batch} x {tokens // batch:,} tokens, {q_len} queries: {scattered:,.0f} GB/s",
            )
    for axes, page in ((page_1, 1), (page_64, 64)):
        axes.set(title=f"attention, page size {page}", xlabel="contiguity", ylim=(0.9, 1.1))
        axes.set_ylabel("bandwidth, against contiguity 0")
        axes.legend(fontsize=7)
    windows = results["move"]["cases"]
    moves.plot([row["window_units"] for row in windows], [row["of_copy_rate"] for row in windows], "s-")
    moves.set_xscale("log", base=2)
    moves.set_xticks([row["window_units"] for row in windows], [f"{row['window_units']:,}" for row in windows])
    moves.axhline(0.7, ls=":", color="grey")
    moves.set(
        title="move", xlabel="slots of a window", ylabel="bandwidth, against a device copy", xscale="log", ylim=(0, 1)
    )
    figure.suptitle(results["kernel"]["machine"]["gpu"])
    figure.savefig(docs / "defrag.png", dpi=110)


def machine() -> dict[str, str]:
    """What it ran on."""
    from tools import kernels

    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "kernel_hash": kernels.source_hash(),
        "gpu": f"{gpu.name}, sm_{gpu.major}{gpu.minor}" if gpu else "none",
        "cpu": platform.machine(),
        "torch": torch.__version__,
    }


def main() -> None:
    """Run a part, or all that this machine can, and merge its results into the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["churn", "map", *GPU_PARTS, "all", "render"])
    parser.add_argument("--out", type=Path, default=Path("docs/bench/defrag.json"))
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and arguments.part in GPU_PARTS:
        parser.error(f"{arguments.part} needs a CUDA GPU; churn and map run without")
    picture = arguments.out.with_name("kv-map.png")
    server.exit_on_sigterm()
    parts = {
        "churn": lambda: churn(device),
        "map": lambda: draw_map(device, picture),
        "kernel": kernel,
        "fastpath": fastpath,
        "move": move,
        "compaction": compaction,
        "steps": steps,
        "serve": serve,
    }
    results = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    if arguments.part == "render":
        missing = [part for part in ("kernel", "move") if part not in results]
        if missing:
            parser.error(f"{arguments.out} has no results of {' and '.join(missing)}: run these parts on a GPU first")
        render(results, arguments.out.parent)
        return
    everything = list(parts) if device == "cuda" else ["churn", "map"]
    wanted = everything if arguments.part == "all" else [arguments.part]
    for part in wanted:
        name = f"{part} on {device}" if part == "churn" else part
        results[name] = {"machine": machine()} | parts[part]()
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

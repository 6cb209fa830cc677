"""What defragmentation is worth: `python -m tools.bench_defrag PART ... [--out FILE]`, of these parts, or all.

    churn        replays one trace with upstream's allocator and with extents; runs anywhere
    map          compacts a churned pool to the end: runs, and kv-map.png beside the file; runs anywhere
    kernel       attention bandwidth against contiguity (needs a CUDA GPU and the kernel library, not SGLang)
    fastpath     what the kernel would win if it read no indices where KV is contiguous (as kernel; builds one)
    move         bandwidth of the move that compaction launches (as kernel)
    compaction   what whole passes cost, and how fast they move KV (needs a CUDA GPU)
    steps        decode step times while compacting and not (needs a CUDA GPU)
    serve        tokens a second with tiers off, 0, 1, and 0 with 1 (needs a CUDA GPU)
    render       defrag.md and defrag.png beside the file, of the parts that it has (after `--add`, with those of
                 another file)

Every comparison is of medians within one run; results are merged into the JSON file under the name of the part. A part
that fails costs only itself. CUDA_VISIBLE_DEVICES picks the GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from tools import defrag_page, server
from tools.churn import World

if TYPE_CHECKING:
    from sglang_sm120.kvdefrag.compactor import Pool

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
        "alloc_us_per_step": sum(world.cost.seconds.values()) / world.cost.steps * 1e6,
        "requests": world.count,
        "cached_tokens": world.cached_tokens,
    } | {f"{what}_us_per_step": seconds / world.cost.steps * 1e6 for what, seconds in world.cost.seconds.items()}


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
    before, maps, passes = world.survey_runs(), {"before": world.owners()}, 0
    while world.compact(serving.WINDOW_UNITS, 4 * serving.WINDOW_UNITS):
        passes += 1
    after = world.survey_runs()
    picture.parent.mkdir(parents=True, exist_ok=True)
    kv_map.draw(maps | {"after": world.owners()}).save(picture)
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
        raise RuntimeError(f"{loader} does not read slots by `{INDEXED}`: tell tools/bench_defrag.py how it does")
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
    from sglang_sm120.kvdefrag import serving

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
    # A pass that gathers moves lists whose slots lie anywhere.
    src = torch.randperm(slots, device="cuda").view(-1, serving.WINDOW_UNITS)
    dst = src.roll(1, dims=1)
    ms = median_ms(partial(ops.move_kv, pointers, row_bytes, src, dst))
    anywhere = {"list_units": serving.WINDOW_UNITS, "ms": ms, "of_copy_rate": copy_ms / ms}
    print(json.dumps(anywhere), flush=True)
    copy = {"copy_gb_per_s": moved_bytes / copy_ms / 1e6}
    return {"layers": layers, "slots": slots} | copy | {"cases": cases, "anywhere": anywhere}


def compaction(layers: int = 61, slots: int = 262_144, rounds: int = 4) -> dict:
    """Whole passes at the default budget over a churned pool: what they bring, what they cost, how fast they move KV.

    The first round begins with the pool that upstream's allocator leaves; it also loads what a pass launches, so it is
    reported alone. Before each other round slots are mixed up again. Bytes are those read and written for units that
    change place. They are set against three times: from the first launch of the move to its last, to the last launch
    of the pass, and the pass as a whole by the wall clock, the GPU idle before and after.
    """
    from sglang_sm120.kvdefrag import compactor, serving
    from sglang_sm120.kvdefrag.settings import Settings

    buffers = [torch.randn(slots + 1, 1, HEAD_DIM, device="cuda").bfloat16() for _ in range(layers)]
    pool = compactor.Pool(buffers, page_size=1)
    copy_ms = median_ms(lambda: [a.copy_(b) for a, b in zip(buffers[::2], buffers[1::2], strict=False)])
    copy_rate = 2 * (layers // 2) * buffers[0].nbytes / copy_ms
    budget = int(Settings().compact_ms / 1000 * serving.move_bytes_per_s("cuda") / (2 * pool.unit_bytes))
    world = churned("cuda", slots)
    before = world.survey_runs()
    first = compact_to_the_end(world, pool, budget)
    after = world.survey_runs()
    passes = []
    for _ in range(rounds):
        mix_up(world)
        passes += compact_to_the_end(world, pool, budget)
    gb = sum(p["bytes"] for p in passes) / 1e9
    rates = {of: gb / sum(p[f"{of}_ms"] for p in passes) * 1000 for of in ("move", "commit", "wall")}
    result = {
        "layers": layers,
        "pool_tokens": slots,
        "budget_units": budget,
        "passes": len(passes),
        "passes_that_gather": sum(p["gathers"] for p in passes),
        "copy_gb_per_s": copy_rate / 1e6,
        "gb_per_s": rates,
        "of_copy_rate": {of: rate * 1e6 / copy_rate for of, rate in rates.items()},
        "median": {key: statistics.median(p[key] for p in passes) for key in passes[0]},
        "all": passes,
        "first_round": first,
        "mean_run_length_before": before.mean_length,
        "mean_run_length_after": after.mean_length,
        "contiguity_before": before.contiguity,
        "contiguity_after": after.contiguity,
    }
    print(json.dumps({key: result[key] for key in result if key not in ("all", "first_round")}), flush=True)
    return result


def compact_to_the_end(world: World, pool: Pool, budget_units: int) -> list[dict[str, float]]:
    """Passes until none gains anything: milliseconds of each part on the host, of moving on the device, and bytes."""
    from sglang_sm120.kvdefrag import compactor, planner, serving

    passes: list[dict[str, float]] = []
    while len(passes) < 40:
        events = {name: torch.cuda.Event(enable_timing=True) for name in ("pool 0 part 0 chunk 0", "rows", "done")}
        marks = [_now()]
        survey = world.survey()
        marks.append(time.perf_counter())
        moves = planner.plan(survey, serving.WINDOW_UNITS, budget_units)
        marks.append(time.perf_counter())
        if moves is None:
            break
        compactor.commit(survey, moves, [pool], partial(_record, events))
        marks.append(time.perf_counter())
        marks.append(_now())
        first, moved, last = events.values()
        passes.append({
            "survey_ms": (marks[1] - marks[0]) * 1000,
            "plan_ms": (marks[2] - marks[1]) * 1000,
            "commit_host_ms": (marks[3] - marks[2]) * 1000,
            "move_ms": first.elapsed_time(moved),
            "commit_ms": first.elapsed_time(last),
            "wall_ms": (marks[4] - marks[0]) * 1000,
            "units": moves.units_moved,
            "bytes": 2 * moves.units_moved * pool.unit_bytes,
            "gathers": moves.pieces > 1,
            "pieces": moves.pieces,
            "launches": len(moves.chunks),
        })  # fmt: skip
    return passes


def mix_up(world: World, window: int = 1_000) -> None:
    """Shuffle the slots within windows, as decoding side by side does, for all who hold them; KV stays as it is."""
    from sglang_sm120.kvdefrag import compactor, planner

    survey = world.survey()
    new_slot = torch.arange(len(survey.owner), device=survey.owner.device)
    mixed = new_slot[1 : 1 + world.size // window * window].view(-1, window)
    mixed.copy_(mixed.gather(1, torch.rand(mixed.shape, device=mixed.device).argsort(dim=1)))
    compactor.commit(survey, planner.Plan([], new_slot, 0, 0, 0), [])


def steps(
    layers: int = 61, slots: int = 262_144, requests: int = 32, tokens: int = 4_096, count: int = 800, repeats: int = 4
) -> dict:
    """Milliseconds of decode steps while tier 1 compacts at its default budget and pace, and while it does not.

    A step is upstream's allocation and the attention of all layers, in a CUDA graph, until the GPU is done: no dense
    layers and no overlap, so a pass weighs more than in a server, save for the overlap that a server gives up. Each
    stretch of `count` steps begins with the same requests and with their slots mixed up: a pass finds more to do than
    its budget. Stretches with and without compaction take turns, in both orders.
    """
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang_sm120 import ops
    from sglang_sm120.kvdefrag import serving
    from sglang_sm120.kvdefrag.settings import Settings, When

    world = World(slots, max_requests=requests, max_context=2 * tokens, device="cuda", with_kv=False)
    pool = MLATokenToKVPool(
        size=slots, page_size=1, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=layers,
        device="cuda", enable_memory_saver=False,
    )  # fmt: skip
    for buffer in pool.kv_buffer:
        buffer.normal_()
    world.allocator._kvcache = pool
    # The scheduler's own hook, around the allocation of a step; a threshold of 1 makes a pass of every look.
    hooks, scheduler = serving.Hooks(Settings(compact=When.AUTO, compact_below=1.0)), world.scheduler()
    scheduler.is_fully_idle = lambda: False
    random = Random(0)
    prompts = [[random.randrange(50) for _ in range(tokens)] for _ in range(requests)]

    def begin_stretch() -> None:
        for req in list(world.running):
            world.retract(req)
        world.evict(slots)
        for prompt in prompts:
            assert world.arrive(prompt, 1 << 20)
        mix_up(world)
        hooks.on_idle(lambda _: None, scheduler)  # none of this is a step
        rows.copy_(torch.tensor([req.kv.req_pool_idx for req in world.running]))
        lens.fill_(tokens)

    q = torch.randn(requests, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    rows = torch.empty(requests, dtype=torch.int64, device="cuda")
    lens = torch.empty(requests, dtype=torch.int64, device="cuda")
    begin_stretch()

    def attend() -> None:
        for buffer in pool.kv_buffer:
            ops.mla_verify(q, buffer.view(-1, HEAD_DIM), world.rows.req_to_token, rows, lens, q_len=1, sm_scale=0.1)

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attend()

    def passes() -> int:
        state = hooks.of(scheduler).report()
        if state["refused_because"]:
            raise RuntimeError(f"compaction was refused: {state['refused_because']}")
        return state["passes"]

    def next_batch(*_: object, **__: object) -> SimpleNamespace:
        world.allocate_step()
        return SimpleNamespace(batch_to_run=world.running)

    def step(compacting: bool) -> float:
        begin = _now()
        if compacting:
            hooks.before_next_batch(next_batch, scheduler, running_batch=None, last_batch=None)
        else:
            next_batch()
        lens.add_(1)
        graph.replay()
        milliseconds = (_now() - begin) * 1000
        world.accept_step()
        return milliseconds

    times: dict[str, list[list[float]]] = {"off": [], "on": []}
    done: list[int] = []
    for repeat in range(-1, repeats):  # the first, in which all that is launched is loaded, does not count
        for name in ("off", "on") if repeat % 2 else ("on", "off"):
            begin_stretch()
            before = passes()
            stretch = [step(name == "on") for _ in range(count)]
            if repeat >= 0:
                times[name].append(stretch)
                done += [passes() - before] * (name == "on")
    result = {
        "layers": layers,
        "requests": requests,
        "steps": repeats * count,
        "passes": done,
        "mean_ms_of_stretches": {name: [statistics.mean(stretch) for stretch in rows] for name, rows in times.items()},
    } | _compare(*([ms for stretch in rows for ms in stretch] for rows in times.values()))
    print(json.dumps(result), flush=True)
    return result


def _compare(off: Sequence[float], on: Sequence[float]) -> dict[str, dict[str, float]]:
    """Step times of both, and by how much each figure is larger with compaction."""
    summaries = _step_summary(off), _step_summary(on)
    rise = {key.removesuffix("_ms"): summaries[1][key] / summaries[0][key] - 1 for key in summaries[0]}
    return {"off": summaries[0], "on": summaries[1], "rise": rise}


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


def serve(save: Callable[[dict], None], requests: int = 96, arrivals_per_s: float = 64.0, repeats: int = 4) -> dict:
    """Poisson traffic, faster than it is served, with tiers off, 0, 1, and 0 with 1; and step times, tier 1 on and off.

    One server has upstream's allocator and one has extents; both have tier 1, and a request stops and starts it. All
    take turns, in an order that is turned round every time; each turn begins with an empty pool and is measured once
    that has filled up. `save` gets what there is after every round of turns.
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

    def traffic(name: str, seed: int) -> dict[str, float]:
        up = ups[TIERS[name][0]]
        _set_tier_1(up, TIERS[name][1])
        offer(up.generate, requests // 3, arrivals_per_s, 100 + seed)
        before = _compaction_state(up)
        return offer(up.generate, requests, arrivals_per_s, seed) | _since(before, up)

    def decoding(name: str, seed: int) -> dict[str, float]:
        up = ups[TIERS[name][0]]
        _set_tier_1(up, TIERS[name][1])
        before = _compaction_state(up)
        return step_times(up, seed) | _since(before, up)

    turns = [("tokens", name, traffic) for name in TIERS] + [("steps", name, decoding) for name in ("off", "1")]
    rows: dict[str, dict[str, list[dict[str, float]]]] = {"tokens": {}, "steps": {}}
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        extents = sorted({extent for extent, _ in TIERS.values()})
        with ThreadPoolExecutor(len(extents)) as pool:
            ups = dict(zip(extents, pool.map(start, extents), strict=True))
        print("servers are up", flush=True)
        for seed in range(repeats):
            for kind, name, turn in turns if seed % 2 else reversed(turns):
                row = turn(name, seed)
                rows[kind].setdefault(name, []).append(row)
                print(json.dumps({kind: name} | row), flush=True)
            result = {
                "requests": requests,
                "arrivals_per_s": arrivals_per_s,
                "repeats": seed + 1,
                "flags": SERVE_FLAGS,
                "cases": [{"tiers": name} | _against_off(rows["tokens"], name, "tokens_per_s") for name in TIERS],
                "steps": {name: _against_off(rows["steps"], name, "mean_ms") for name in ("off", "1")},
            }
            save(result)
    return result


def _against_off(rows: dict[str, list[dict[str, float]]], name: str, key: str) -> dict[str, Any]:
    """Medians of a variant; of `key` also the spread over the repeats and the ratio to "off" of the same repeat."""
    mine = [row[key] for row in rows[name]]
    ratios = [value / off[key] for value, off in zip(mine, rows["off"], strict=True)]
    return {key: statistics.median(row[key] for row in rows[name]) for key in rows[name][0]} | {
        "spread": (max(mine) - min(mine)) / statistics.median(mine),
        "against_off": statistics.median(ratios),
        "against_off_from": min(ratios),
        "against_off_to": max(ratios),
        "repeats": rows[name],
    }


def _set_tier_1(up: server.Server, on: bool) -> None:
    """Empty the pool and the prefix cache, and start or stop compaction."""
    up.post("/set_internal_state", {"server_args": {"sm120_kv_compact": int(on)}})
    up.get("/flush_cache?timeout=30")


def _compaction_state(up: server.Server) -> dict[str, Any]:
    return up.info()["internal_states"][0]["sm120_kv"]


def _since(before: dict[str, Any], up: server.Server) -> dict[str, float]:
    """Passes, units moved and host milliseconds of a pass between two states."""
    now = _compaction_state(up)
    if now["refused_because"]:
        raise RuntimeError(f"compaction was refused: {now['refused_because']}")
    passes, units, seconds = (now[key] - before[key] for key in ("passes", "units_moved", "host_seconds"))
    return {"passes": passes, "units_moved": units, "host_ms_a_pass": seconds / passes * 1000 if passes else 0.0}


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
    """Run parts, or all that this machine can, and merge their results into the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="+", choices=["churn", "map", *GPU_PARTS, "all", "render"])
    parser.add_argument("--out", type=Path, default=Path("docs/bench/defrag.json"))
    parser.add_argument("--add", type=Path, help="results of another run, to take over the parts that it has")
    arguments = parser.parse_args()
    if arguments.add:
        write(arguments.out, json.loads(arguments.add.read_text()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wanted = [part for part in arguments.part if part != "render"]
    if "all" in wanted:
        wanted = ["churn", "map", *(GPU_PARTS if device == "cuda" else ())]
    needs_gpu = sorted(set(wanted) & set(GPU_PARTS))
    if device == "cpu" and needs_gpu:
        parser.error(f"{' and '.join(needs_gpu)}: needs a CUDA GPU; churn and map run without")
    parts: dict[str, Callable[[Callable[[dict], None]], dict]] = {
        "churn": lambda _: churn(device),
        "map": lambda _: draw_map(device, arguments.out.with_name("kv-map.png")),
        "kernel": lambda _: kernel(),
        "fastpath": lambda _: fastpath(),
        "move": lambda _: move(),
        "compaction": lambda _: compaction(),
        "steps": lambda _: steps(),
        "serve": serve,
    }
    failed = []
    for part in wanted:
        save = partial(keep, arguments.out, f"{part} on {device}" if part == "churn" else part)
        try:
            save(parts[part](save))
        except Exception:
            traceback.print_exc()
            failed.append(part)
        if device == "cuda":
            torch.cuda.empty_cache()  # the servers of another part need it
    if "render" in arguments.part:
        defrag_page.render(arguments.out)
    if failed:
        raise SystemExit(f"error: failed: {', '.join(failed)}")


def keep(file: Path, name: str, result: dict) -> None:
    """Write down the result of a part, and what it ran on."""
    write(file, {name: {"machine": machine()} | result})


def write(file: Path, parts: dict[str, dict]) -> None:
    """Put parts into the file, beside what others may have put there meanwhile."""
    results = json.loads(file.read_text()) if file.exists() else {}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results | parts, indent=1) + "\n")


if __name__ == "__main__":
    server.exit_on_signals()
    main()

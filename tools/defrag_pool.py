"""Parts of `bench_defrag` over upstream's own pools without a model: a churned pool, compaction, steps beside it."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from tools.churn import World
from tools.defrag_kernels import HEAD_DIM, HEADS, median_ms

if TYPE_CHECKING:
    from sglang_sm120.kvdefrag.compactor import Pool

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


def _record(events: dict[str, torch.cuda.Event], stage: str) -> None:
    if stage in events:
        events[stage].record()


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def mix_up(world: World, window: int = 1_000) -> None:
    """Shuffle the slots within windows, as decoding side by side does, for all who hold them; KV stays as it is."""
    from sglang_sm120.kvdefrag import compactor, planner

    survey = world.survey()
    new_slot = torch.arange(len(survey.owner), device=survey.owner.device)
    mixed = new_slot[1 : 1 + world.size // window * window].view(-1, window)
    mixed.copy_(mixed.gather(1, torch.rand(mixed.shape, device=mixed.device).argsort(dim=1)))
    compactor.commit(survey, planner.Plan([], new_slot, 0, 0, 0), [])


class DecodeLoop:
    """Decode steps of `requests` requests of `tokens` tokens, with the scheduler's own hook around their allocation.

    A step is upstream's allocation and the attention of all layers, in a CUDA graph, until the GPU is done.
    """

    def __init__(self, layers: int, slots: int, requests: int, tokens: int) -> None:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang_sm120.kvdefrag import serving
        from sglang_sm120.kvdefrag.settings import Settings, When

        self._world = World(slots, max_requests=requests, max_context=2 * tokens, device="cuda", with_kv=False)
        self._pool = MLATokenToKVPool(
            size=slots, page_size=1, dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, layer_num=layers,
            device="cuda", enable_memory_saver=False,
        )  # fmt: skip
        for buffer in self._pool.kv_buffer:
            buffer.normal_()
        self._world.allocator._kvcache = self._pool
        # A threshold of 1 makes a pass of every look.
        self._hooks = serving.Hooks(Settings(compact=When.AUTO, compact_below=1.0))
        self._scheduler = self._world.scheduler()
        self._scheduler.is_fully_idle = lambda: False
        random = Random(0)
        self._prompts = [[random.randrange(50) for _ in range(tokens)] for _ in range(requests)]
        self._q = torch.randn(requests, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self._rows = torch.empty(requests, dtype=torch.int64, device="cuda")
        self._lens = torch.empty(requests, dtype=torch.int64, device="cuda")
        self.begin_stretch()
        self._attend()
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._attend()

    def begin_stretch(self) -> None:
        """Begin with the same requests and their slots mixed up: a pass finds more to do than its budget."""
        world = self._world
        for req in list(world.running):
            world.retract(req)
        world.evict(world.size)
        for prompt in self._prompts:
            assert world.arrive(prompt, 1 << 20)
        mix_up(world)
        self._hooks.on_idle(lambda _: None, self._scheduler)  # none of this is a step
        self._rows.copy_(torch.tensor([req.kv.req_pool_idx for req in world.running]))
        self._lens.fill_(len(self._prompts[0]))

    def _attend(self) -> None:
        from sglang_sm120 import ops

        table = self._world.rows.req_to_token
        for buffer in self._pool.kv_buffer:
            latents = buffer.view(-1, HEAD_DIM)
            ops.mla_verify(self._q, latents, table, self._rows, self._lens, q_len=1, sm_scale=0.1)

    def step(self, compacting: bool) -> float:
        """Its milliseconds."""
        begin = _now()
        if compacting:
            self._hooks.before_next_batch(self._next_batch, self._scheduler, running_batch=None, last_batch=None)
        else:
            self._next_batch()
        self._lens.add_(1)
        self._graph.replay()
        milliseconds = (_now() - begin) * 1000
        self._world.accept_step()
        return milliseconds

    def _next_batch(self, *_: object, **__: object) -> SimpleNamespace:
        self._world.allocate_step()
        return SimpleNamespace(batch_to_run=self._world.running)

    def passes(self) -> int:
        """How many there were. RuntimeError once compaction is refused."""
        state = self._hooks.of(self._scheduler).report()
        if state["refused_because"]:
            raise RuntimeError(f"compaction was refused: {state['refused_because']}")
        return state["passes"]


def steps(
    layers: int = 61, slots: int = 262_144, requests: int = 32, tokens: int = 4_096, count: int = 800, repeats: int = 4
) -> dict:
    """Milliseconds of decode steps while tier 1 compacts at its default budget and pace, and while it does not.

    There are no dense layers and no overlap, so a pass weighs more than in a server, save for the overlap that a server
    gives up. Stretches of `count` steps with and without compaction take turns, in both orders.
    """
    loop = DecodeLoop(layers, slots, requests, tokens)
    times: dict[str, list[list[float]]] = {"off": [], "on": []}
    done: list[int] = []
    for repeat in range(-1, repeats):  # the first, in which all that is launched is loaded, does not count
        for name in ("off", "on") if repeat % 2 else ("on", "off"):
            loop.begin_stretch()
            before = loop.passes()
            stretch = [loop.step(name == "on") for _ in range(count)]
            if repeat >= 0:
                times[name].append(stretch)
                done += [loop.passes() - before] * (name == "on")
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
    summaries = step_summary(off), step_summary(on)
    rise = {key.removesuffix("_ms"): summaries[1][key] / summaries[0][key] - 1 for key in summaries[0]}
    return {"off": summaries[0], "on": summaries[1], "rise": rise}


def step_summary(milliseconds: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and the longest."""
    times = sorted(milliseconds)
    at = {f"p{percent}_ms": times[int(percent / 100 * len(times))] for percent in (50, 95, 98, 99)}
    return {"mean_ms": statistics.mean(times)} | at | {"longest_ms": times[-1]}

"""The part of `bench_defrag` against servers: traffic and steps with the tiers of defragmentation on and off."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

from tools import server
from tools.defrag_pool import step_summary

# Name of the tiers that are on: tokens of an extent, and whether compaction runs.
TIERS = {"off": ("0", False), "0": ("256", False), "1": ("0", True), "0+1": ("256", True)}
SERVE_FLAGS = (
    "--dtype bfloat16 --page-size 1 --disable-prefill-cuda-graph --skip-server-warmup --sampling-backend pytorch "
    "--max-total-tokens 200000 --context-length 16000 --max-running-requests 32 --cuda-graph-bs-decode 8 16 24 32 "
    "--sleep-on-idle --enable-metrics --mem-fraction-static 0.6"
)


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
    return step_summary([(b - a) * 1000 for a, b in pairwise(arrivals[50:])])  # by then all have started


def _token_times(up: server.Server, prompt: list[int], tokens: int) -> Iterator[float]:
    """When each token of a streamed answer arrives."""
    body = {"input_ids": prompt, "sampling_params": server.greedy_sampling(tokens), "stream": True}
    for line in up.stream("/generate", body, timeout_s=300):
        if line.startswith(b"data: {"):
            yield time.perf_counter()

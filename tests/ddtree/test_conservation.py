"""Random traffic, every step audited inside the scheduler: slots are conserved and cached prefixes stay intact."""

from __future__ import annotations

import concurrent.futures
import json
import os
import random
import threading
from pathlib import Path

import pair
import pytest
from served import retract_every

from tools import server as launcher

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

AUDIT = Path(__file__).parent / "faults" / "audit"
STEPS, FEWER_STEPS = 10_000, 2000
POOL_TOKENS = 1536


def environment(report: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(AUDIT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "DDTREE_AUDIT": str(report)} | retract_every(25) | more


def flags(page_size: int) -> list[str]:
    """A pool so small that prefixes are evicted all the time."""
    pool = ["--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "8", "--page-size", str(page_size)]
    return pair.ddtree_flags(8, 8, *pool)


def traffic(server: launcher.Server, prompts: list[list[int]], counts, steps: int) -> None:
    """Clients that ask for random lengths at random temperatures, share prefixes, and abort now and then."""
    stop = threading.Event()

    def client(seed: int) -> None:
        rng, turn = random.Random(seed), 0
        while not stop.is_set():
            turn += 1
            prompt = rng.choice(prompts)[: rng.choice([30, 60, 90])]
            sampling = {"max_new_tokens": rng.randint(1, 150), "temperature": rng.choice([0.0, 1.0])}
            body = {"input_ids": prompt, "sampling_params": sampling, "rid": f"client-{seed}-{turn}"}
            if rng.random() < 0.2:
                threading.Timer(rng.random(), pair.abort, (server, body["rid"])).start()
            server.post("/generate", body)
            if counts()["request_steps"] >= steps:
                stop.set()

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        for finished in [pool.submit(client, seed) for seed in range(12)]:
            finished.result()


@pytest.mark.parametrize("steps", [FEWER_STEPS, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [1, 64])
def test_random_traffic_conserves_slots_and_prefixes(page_size, steps, tmp_path):
    report, log = tmp_path / "audit.json", tmp_path / "server.log"

    def counts() -> dict[str, int]:
        try:
            return json.loads(report.read_text())
        except (FileNotFoundError, json.JSONDecodeError):  # not there yet, or just being written
            return {"request_steps": 0}

    with launcher.running(pair.TARGET, log, flags(page_size), environment(report)) as server:
        traffic(server, pair.held_out_prompts(6, lengths=(120, 120), seed=3), counts, steps)
        last = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
        server.post("/generate", last | {"rid": "audit-last"})
    seen = counts()
    assert seen["request_steps"] >= steps
    assert min(seen.values()) > 0, seen
    assert "#retracted_reqs: 1" in log.read_text()


def test_the_audit_finds_an_overwritten_prefix(tmp_path):
    prompts = pair.held_out_prompts(4, lengths=(120, 120), seed=3)
    with (
        launcher.running(
            pair.TARGET, tmp_path / "log", flags(1), environment(tmp_path / "audit.json", DDTREE_AUDIT_FAULT="1")
        ) as server,
        pytest.raises(Exception, match=r"refused|reset|closed|disconnected|timed out|500"),
    ):
        for _ in range(3):
            server.generate(prompts, 16)
    assert "audit: the KV of cached slot" in (tmp_path / "log").read_text()

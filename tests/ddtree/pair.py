"""The trained pair in tests/fixtures, and prompts of text that it was not trained on."""

from __future__ import annotations

import json
import urllib.request
from functools import partial

from tools import bench_accept
from tools.server import Server

PAIR = bench_accept.PAIR
TARGET, DRAFTER = PAIR / "target", PAIR / "drafter"
FLAGS = [
    "--dtype",
    "float32",
    "--context-length",
    "2048",
    "--chunked-prefill-size",
    "128",
    "--max-total-tokens",
    "32768",
]


def ddtree_flags(budget: int, topk: int = 8, *more: str) -> list[str]:
    flags = f"--speculative-algorithm DDTREE --speculative-ddtree-budget {budget} --speculative-ddtree-topk {topk}"
    return [*FLAGS, *flags.split(), "--speculative-draft-model-path", str(DRAFTER), *more]


def dflash_flags(*more: str) -> list[str]:
    return [*FLAGS, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFTER), *more]


held_out_prompts = partial(bench_accept.held_out_prompts, lengths=(8, 300))


def abort(server: Server, rid: str = "") -> None:
    """Abort one request, or all of them. The answer has no body."""
    body = json.dumps({"rid": rid, "abort_all": not rid}).encode()
    request = urllib.request.Request(server.url + "/abort_request", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).read()

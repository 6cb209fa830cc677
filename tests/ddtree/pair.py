"""The trained pair in tests/fixtures, and prompts of text that it was not trained on."""

from __future__ import annotations

import shlex
from functools import partial

from tools import pair
from tools.pair import DRAFTER, PAIR, TARGET  # noqa: F401
from tools.server import Server

FLAGS = shlex.split("--dtype float32 --context-length 2048 --chunked-prefill-size 128 --max-total-tokens 32768")


def ddtree_flags(budget: int, topk: int = 8, *more: str) -> list[str]:
    tree = f"--speculative-ddtree-budget {budget} --speculative-ddtree-topk {topk}"
    return [*FLAGS, *pair.DDTREE_FLAGS, *tree.split(), *more]


def dflash_flags(*more: str) -> list[str]:
    return [*FLAGS, "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(DRAFTER), *more]


held_out_prompts = partial(pair.held_out_prompts, lengths=(8, 300))


def abort(server: Server, rid: str = "") -> None:
    """Abort one request, or all of them. The answer has no body."""
    server.post_text("/abort_request", {"rid": rid, "abort_all": not rid})

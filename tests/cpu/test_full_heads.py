"""Prompts through full heads, chunk by chunk over a cached prefix: what a GPU's prompts do, on the CPU in float32.

Only the attention kernel is a stand-in (`full_heads/sitecustomize.py`). Small limits send prefixes of all three kinds
through it: none, one that is read in one piece with the new tokens, and one that is read in several pieces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tools import server as launcher

CHUNK_TOKENS = 128
ONE_PIECE_TOKENS = 512
TOKENS = 4  # the first ones tell: prompts are what is tested


@pytest.fixture(scope="module")
def asked(prompts, expected) -> list[tuple[list[int], list[int]]]:
    """Every third prompt, with the tokens that continue it."""
    return [(prompt, tokens[:TOKENS]) for prompt, tokens in zip(prompts[::3], expected[::3], strict=True)] + [
        (prompts[-1], expected[-1][:TOKENS])
    ]


@pytest.fixture
def serve(tiny_model, tmp_path):
    def start(**env: str):
        path = os.pathsep.join([str(Path(__file__).parent / "full_heads"), os.environ.get("PYTHONPATH", "")])
        limits = {
            "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD": "1",
            "SGLANG_MAX_KV_CHUNK_CAPACITY": str(ONE_PIECE_TOKENS),
        }
        flags = f"--dtype float32 --chunked-prefill-size {CHUNK_TOKENS}".split()
        return launcher.running(tiny_model, tmp_path / "log", flags, {"PYTHONPATH": path} | limits | env)

    return start


def test_prompts_equal_transformers(serve, asked):
    prompts, expected = map(list, zip(*asked, strict=True))
    assert max(map(len, prompts)) > ONE_PIECE_TOKENS + CHUNK_TOKENS, "some prefix must be read in several pieces"
    with serve() as up:
        one_by_one = [up.generate([prompt], TOKENS)[0]["output_ids"] for prompt in prompts]
        batched = [answer["output_ids"] for answer in up.generate(prompts, TOKENS)]
    assert one_by_one == expected
    assert batched == expected


def test_keys_that_end_with_the_first_chunk_are_seen(serve, asked):
    """The fault that once hid behind random weights: the test must fail on it."""
    with serve(SHORT_KEYS="1") as up:
        wrong = [len(p) for p, want in asked if up.generate([p], TOKENS)[0]["output_ids"] != want]
    assert wrong and min(wrong) > CHUNK_TOKENS

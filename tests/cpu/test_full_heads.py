"""Prompts through full heads, chunk by chunk over a cached prefix: what a GPU's prompts do, on the CPU in float32.

Only the attention kernel is a stand-in (`full_heads/sitecustomize.py`). Small limits send prefixes of all three kinds
through it: none, one that is read in one piece with the new tokens, and one that is read in several pieces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from greedy_text import NEW_TOKENS

from tools import server as launcher

CHUNK_TOKENS = 128
ONE_PIECE_TOKENS = 512


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


def test_prompts_equal_transformers(serve, prompts, expected):
    assert max(map(len, prompts)) > ONE_PIECE_TOKENS + CHUNK_TOKENS, "some prefix must be read in several pieces"
    with serve() as up:
        one_by_one = [up.generate([prompt], NEW_TOKENS)[0]["output_ids"] for prompt in prompts]
        batched = [answer["output_ids"] for answer in up.generate(prompts, NEW_TOKENS)]
    assert one_by_one == expected
    assert batched == expected


def test_keys_that_end_with_the_first_chunk_are_seen(serve, prompts, expected):
    """The fault that once hid behind random weights: the test must fail on it."""
    with serve(SHORT_KEYS="1") as up:
        answers = [up.generate([prompt], NEW_TOKENS)[0]["output_ids"] for prompt in prompts]
    wrong = [len(prompt) for prompt, got, want in zip(prompts, answers, expected, strict=True) if got != want]
    assert wrong and min(wrong) > CHUNK_TOKENS

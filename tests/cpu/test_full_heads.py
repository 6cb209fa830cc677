"""Prompts through full heads, chunk by chunk over a cached prefix: what a GPU's prompts do, on the CPU in float32.

Only the attention kernel is a stand-in (`full_heads/sitecustomize.py`). Small limits send prefixes of all three kinds
through it: none, one that is read in one piece with the new tokens, and one that is read in several pieces.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tools import server as launcher

CHUNK_TOKENS = 128
ONE_PIECE_TOKENS = 512
LENGTHS = [5, 129, 300, 777]
# Nats. Random weights spread attention, so a fault moves a log-probability little: float32 must do better than that.
ROUNDING, FAULT = 1e-4, 1e-3


@pytest.fixture(scope="module")
def asked(tiny_model, prompts) -> list[tuple[list[int], int, float]]:
    """A prompt of each length, the token that follows it in transformers, and that token's log-probability."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    found = []
    for length in LENGTHS:
        prompt = next(p for p in prompts if len(p) == length)
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        found.append((prompt, int(logprobs.argmax()), float(logprobs.max())))
    return found


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


def distances(up: launcher.Server, asked: list[tuple[list[int], int, float]], batch: int) -> list[float]:
    """How far each answer's log-probability of transformers' token is from transformers'."""
    answers = []
    for at in range(0, len(asked), batch):
        body = {
            "input_ids": [prompt for prompt, *_ in asked[at : at + batch]],
            "token_ids_logprob": [[token] for _, token, _ in asked[at : at + batch]],
        }
        sampling = {"temperature": 0, "max_new_tokens": 1}
        answers += up.post("/generate", body | {"return_logprob": True, "sampling_params": sampling})
    got = [answer["meta_info"]["output_token_ids_logprobs"][0][0][0] for answer in answers]
    return [abs(have - want) for have, (*_, want) in zip(got, asked, strict=True)]


def test_prompts_equal_transformers(serve, asked):
    assert max(LENGTHS) > ONE_PIECE_TOKENS + CHUNK_TOKENS, "some prefix must be read in several pieces"
    with serve() as up:
        assert max(distances(up, asked, batch=1)) < ROUNDING
        up.get("/flush_cache")
        assert max(distances(up, asked, batch=len(asked))) < ROUNDING


@pytest.mark.slow
def test_keys_that_end_with_the_first_chunk_are_seen(serve, asked):
    """The fault that once hid behind random weights: the test must fail on it."""
    with serve(SHORT_KEYS="1") as up:
        found = distances(up, asked, batch=1)
    assert found[0] < ROUNDING, "a prompt of one chunk has no prefix"
    assert min(found[1:]) > FAULT, found

"""The patched server on the CPU against transformers on the same weights, in float32: the same greedy tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from greedy_text import LENGTHS, NEW_TOKENS

from tools import server as launcher

CHUNK_TOKENS = 256


@pytest.fixture(scope="module", params=[1, 64], ids=["page1", "page64"])
def server(request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("server") / "server.log"
    flags = f"--dtype float32 --enable-metrics --page-size {request.param} --chunked-prefill-size {CHUNK_TOKENS}"
    with launcher.running(tiny_model, log, flags.split()) as up:
        yield up


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_single_prompts_equal_transformers(server, prompts, expected):
    answers = [server.generate([prompt], NEW_TOKENS)[0] for prompt in prompts]
    assert tokens(answers) == expected


def test_batched_with_prefix_hits_equal_transformers(server, prompts, expected):
    """All at once, right after the single run: every prompt finds its prefix in the cache."""
    server.generate(prompts, 1)
    answers = server.generate(prompts, NEW_TOKENS)
    assert tokens(answers) == expected
    hits = [a["meta_info"]["cached_tokens"] for a in answers]
    assert hits[-1] >= 832, hits  # 900 tokens: all but the last page of 64
    assert sum(hit > 0 for hit in hits) >= sum(n > 64 for n in LENGTHS)


def test_batched_cold_and_chunked_equal_transformers(server, prompts, expected):
    server.get("/flush_cache")
    answers = server.generate(prompts, NEW_TOKENS)
    assert tokens(answers) == expected
    assert max(LENGTHS) > 2 * CHUNK_TOKENS, "some prompt must be prefilled in several chunks"


def test_the_backend_served_it(server):
    assert server.info()["attention_backend"] == "sm120_mla"
    metrics = server.get("/metrics")
    for mode in ("decode", "extend"):
        assert f'sm120:attention_steps_total{{mode="{mode}",path="reference"}}' in metrics

"""A tree of width one is the chain, to the bit; and the mask is what the target's attention sees."""

from __future__ import annotations

import os
from pathlib import Path

import pair
import pytest

from tools import server as launcher

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

FAULT = Path(__file__).parent / "faults" / "hidden_root"
CHAIN = pair.ddtree_flags(7, 1)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.held_out_prompts(16, seed=1)


def answers(log: Path, flags: list[str], prompts: list[list[int]], **env: str) -> list[tuple]:
    """Per prompt: tokens, their log-probabilities, and how many steps of each accept length it took."""
    body = {"input_ids": prompts, "return_logprob": True}
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True}
    with launcher.running(pair.TARGET, log, flags, env) as server:
        metas = [answer["meta_info"] for answer in server.post("/generate", body)]
    return [(m["output_token_logprobs"], m["spec_verify_ct"], m["spec_correct_drafts_histogram"]) for m in metas]


@pytest.fixture(scope="module")
def dflash(prompts, tmp_path_factory) -> list[tuple]:
    return answers(tmp_path_factory.mktemp("chain") / "dflash.log", pair.dflash_flags(), prompts)


def test_width_one_is_upstreams_chain_byte_for_byte(prompts, dflash, tmp_path):
    assert answers(tmp_path / "ddtree.log", CHAIN, prompts) == dflash
    assert max(len(histogram) for *_, histogram in dflash) > 4, "no long accept was tried"


def test_hiding_the_root_from_its_descendants_changes_the_output(prompts, dflash, tmp_path):
    path = os.pathsep.join([str(FAULT), *filter(None, [os.environ.get("PYTHONPATH")])])
    broken = answers(tmp_path / "broken.log", CHAIN, prompts, PYTHONPATH=path)
    tokens = [[token for _, token, _ in logprobs] for logprobs, *_ in broken]
    assert tokens != [[token for _, token, _ in logprobs] for logprobs, *_ in dflash]

"""What stands around a decode step: log-probabilities, grammars, stops, filters, aborts, context end, adaptivity."""

from __future__ import annotations

import concurrent.futures
import json
import time
from pathlib import Path

import pair
import pytest

from tools import server as launcher

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

NEW_TOKENS = 24
LOG_PROBABILITIES = {"return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 2}
REGEX = r"(import|class|def) [a-z_]{2,12}\n"


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("features")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.held_out_prompts(12, seed=2)


def ask(server: launcher.Server, prompts: list[list[int]], top: dict | None = None, **sampling) -> list[dict]:
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True} | sampling
    return server.post("/generate", {"input_ids": prompts, "sampling_params": parameters} | (top or {}))


def ask_with(server: launcher.Server, prompts: list[list[int]], each: list[dict]) -> list[dict]:
    """As `ask`, with sampling parameters of its own for each prompt."""
    parameters = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return server.post("/generate", {"input_ids": prompts, "sampling_params": [parameters | own for own in each]})


def biases(prompts: list[list[int]]) -> list[dict]:
    """Of every third request none, of the others one token each, and not the same."""
    return [{"logit_bias": {str(10 + i): 8.0}} if i % 3 else {} for i in range(len(prompts))]


def outcome(answer: dict) -> tuple:
    return answer["output_ids"], answer["text"], answer["meta_info"]["finish_reason"]


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}}}
CASES = {
    "regex": {"regex": REGEX, "ignore_eos": False},
    "JSON schema": {"json_schema": json.dumps(SCHEMA | {"required": ["n", "s"]}), "ignore_eos": False},
    "EBNF": {"ebnf": 'root ::= "import " ("os" | "sys" | "re") "\\n"', "ignore_eos": False},
    "stop regex": {"stop_regex": ["[0-9(]"]},
    "one token": {"max_new_tokens": 1},
    "two answers": {"n": 2},
    "tiny top-p at temperature 1": {"temperature": 1.0, "top_p": 1e-6},
    "stop string": {"stop": ["self", "\n\n"]},
    "stop token": {"stop_token_ids": [10, 13, 32]},
    "eos": {"ignore_eos": False},
    "logit bias": {"logit_bias": {"10": -100.0, "13": -100.0}},
    "top-k 1 at temperature 1": {"temperature": 1.0, "top_k": 1},
}


@pytest.fixture(scope="module")
def plain(prompts, logs) -> dict:
    with launcher.running(pair.TARGET, logs / "plain.log", pair.FLAGS) as server:
        results = {name: [outcome(a) for a in ask(server, prompts, **sampling)] for name, sampling in CASES.items()}
        results["logprobs"] = ask(server, prompts, LOG_PROBABILITIES)
        results["prompt alone"] = ask(server, prompts, LOG_PROBABILITIES, max_new_tokens=0)
        results["different bias"] = [outcome(a) for a in ask_with(server, prompts, biases(prompts))]
        return results


@pytest.fixture(scope="module")
def server(logs, plain):  # after `plain`, whose server is gone by then: an idle one takes a core
    flags = pair.ddtree_flags(16, 8, "--enable-custom-logit-processor")
    with launcher.running(pair.TARGET, logs / "ddtree.log", flags) as up:
        yield up


@pytest.mark.parametrize("case", CASES)
def test_outcome_equals_plain_decoding(server, prompts, plain, case):
    assert [outcome(a) for a in ask(server, prompts, **CASES[case])] == plain[case]


def test_requests_of_a_batch_have_biases_of_their_own(server, prompts, plain):
    assert [outcome(a) for a in ask_with(server, prompts, biases(prompts))] == plain["different bias"]


def test_a_custom_logit_processor_works_on_every_node(server, prompts, plain):
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    processor = {"custom_logit_processor": DisallowedTokensLogitsProcessor.to_str()}
    answers = ask(server, prompts, processor, custom_params={"token_ids": [10, 13]})
    assert [outcome(a) for a in answers] == plain["logit bias"], "what forbids the same tokens"


def test_log_probabilities_equal_plain_decoding(server, prompts, plain):
    for mine, theirs in zip(ask(server, prompts, LOG_PROBABILITIES), plain["logprobs"], strict=True):
        for field in ("input_token_logprobs", "output_token_logprobs", "output_top_logprobs"):
            ours, expected = (flat(a["meta_info"][field]) for a in (mine, theirs))
            assert len(expected) > 1
            assert [token for _, token in ours] == [token for _, token in expected]
            assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], abs=2e-4)


def test_a_prompt_alone_has_the_log_probabilities_of_plain_decoding(server, prompts, plain):
    for mine, theirs in zip(
        ask(server, prompts, LOG_PROBABILITIES, max_new_tokens=0), plain["prompt alone"], strict=True
    ):
        assert mine["meta_info"]["output_token_logprobs"] == theirs["meta_info"]["output_token_logprobs"] == []
        ours, expected = (flat(a["meta_info"]["output_top_logprobs"]) for a in (mine, theirs))
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], abs=2e-4)


def flat(entries: list) -> list[tuple]:
    """(log-probability, token) of a list of entries, or of lists of them."""
    rows = [row for entry in entries for row in (entry if isinstance(entry[0], list) else [entry])]
    return [(value, token) for value, token, _ in rows]


FILTERS = [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9}]


@pytest.mark.parametrize("sampling", FILTERS, ids=str)
def test_sampling_filters_run_and_differ_from_greedy(server, prompts, plain, sampling):
    answers = ask(server, prompts, temperature=1.0, **sampling)
    assert all(len(a["output_ids"]) == NEW_TOKENS for a in answers)
    assert [a["output_ids"] for a in answers] != [ids for ids, *_ in plain["top-k 1 at temperature 1"]]


def test_a_mixed_batch_of_greedy_and_sampling_keeps_the_greedy_ones_exact(server, prompts, plain):
    parameters = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    mixed = [parameters | {"temperature": float(i % 2)} for i in range(len(prompts))]
    answers = server.post("/generate", {"input_ids": prompts, "sampling_params": mixed})
    greedy = [ids for ids, *_ in plain["top-k 1 at temperature 1"]]
    assert [a["output_ids"] for a in answers[::2]] == greedy[::2]


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"min_new_tokens": 4}])
def test_penalties_are_refused_by_name(server, prompts, penalty):
    with pytest.raises(RuntimeError, match=next(iter(penalty))):
        server.generate(prompts[:1], 4, **penalty)


def test_aborted_requests_leave_nothing_behind(server, prompts):
    before = server.generate(prompts[:4], NEW_TOKENS)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        long = pool.submit(server.generate, prompts, 1500)
        time.sleep(3)
        pair.abort(server)
        assert all(a["meta_info"]["finish_reason"]["type"] == "abort" for a in long.result())
    assert [a["output_ids"] for a in server.generate(prompts[:4], NEW_TOKENS)] == [a["output_ids"] for a in before]


def test_the_end_of_the_context_is_reached(logs, prompts):
    """The last windows reach past the context length; rows are wide enough for them, at the largest tree and page 1."""
    flags = pair.ddtree_flags(64, 8, "--context-length", "256", "--page-size", "1")
    with launcher.running(pair.TARGET, logs / "context.log", flags) as server:
        answer = server.generate([prompts[0][:50]], 256 - 50 - 1)[0]
        assert answer["meta_info"]["completion_tokens"] >= 256 - 50 - 4


def test_adaptive_width_and_a_draft_window_are_lossless_too(logs, prompts, plain):
    """Prompts reach past the window, so the drafter reads rows of its own."""
    assert max(map(len, prompts)) > 64
    flags = pair.ddtree_flags(32, 8, "--speculative-ddtree-adaptive", "--speculative-draft-window-size", "64")
    with launcher.running(pair.TARGET, logs / "adaptive.log", flags) as server:
        for _ in range(3):
            answers = ask(server, prompts, temperature=1.0, top_k=1)
            assert [a["output_ids"] for a in answers] == [ids for ids, *_ in plain["top-k 1 at temperature 1"]]

"""Streaming sessions under speculation: every turn sees the log-probabilities that its text has from an empty cache."""

from __future__ import annotations

import inspect

import pair
import pytest

from tools import server as launcher

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

VARIANTS = {
    "tree, overlap": pair.ddtree_flags(16),
    "tree, no overlap, page 64": pair.ddtree_flags(16, 8, "--disable-overlap-schedule", "--page-size", "64"),
    "chain, no overlap": pair.dflash_flags("--disable-overlap-schedule"),
}
# With overlap a turn of two tokens mostly ends before a step that would write the KV of its last one.
NEW_TOKENS = (2, 5, 2, 2, 9, 1, 2)


@pytest.fixture(scope="module", params=VARIANTS)
def server(request, tmp_path_factory):
    flags = [*VARIANTS[request.param], "--enable-streaming-session"]
    with launcher.running(pair.TARGET, tmp_path_factory.mktemp("sessions") / "log", flags) as up:
        yield up


def scored(server: launcher.Server, prompt: list[int], new_tokens: int, since: int, **more) -> dict:
    """The `meta_info` of an answer with log-probabilities of the prompt's tokens from `since` on, and of its own."""
    sampling = launcher.greedy_sampling(new_tokens)
    scores = {"return_logprob": True, "logprob_start_len": since}
    return server.post("/generate", {"input_ids": prompt, "sampling_params": sampling} | scores | more)["meta_info"]


def converse(server: launcher.Server, text: list[int]) -> tuple[list[int], dict[int, float]]:
    """A session of some turns: all its tokens, and the log-probabilities of those that the server wrote, by place."""
    session = server.post("/open_session", {"capacity_of_str_len": 10_000, "streaming": True})
    tokens: list[int] = []
    scores: dict[int, float] = {}
    for turn, new_tokens in enumerate(NEW_TOKENS):
        said = text[:40] if turn == 0 else text[40 + 3 * turn : 43 + 3 * turn]
        answer = scored(server, said, new_tokens, -1, session_params={"id": session})
        assert answer["prompt_tokens"] == len(tokens) + len(said)
        assert turn == 0 or answer["cached_tokens"] >= len(tokens) - 1, "a turn reads the KV of the ones before it"
        tokens += said
        for score, token, _ in answer["output_token_logprobs"]:
            scores[len(tokens)] = score
            tokens.append(token)
    server.post_text("/close_session", {"session_id": session})
    return tokens, scores


def test_turns_read_only_kv_that_was_written(server):
    for text in pair.held_out_prompts(3, lengths=(70, 70), seed=5):
        tokens, scores = converse(server, text)
        server.get("/flush_cache")
        anew = scored(server, tokens, 1, 0)["input_token_logprobs"]
        assert scores == pytest.approx({place: anew[place][0] for place in scores}, abs=1e-4)


def test_the_place_of_the_mend_is_there():
    from sglang.srt.session.streaming_session import StreamingSession

    assert list(inspect.signature(StreamingSession.try_cache_finished_req).parameters) == ["self", "req"]

"""Streaming sessions under speculation: every turn sees the log-probabilities that its text has from an empty cache."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pair
import pytest

from tools import server as launcher

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

VARIANTS = {
    "tree, overlap": pair.ddtree_flags(16),
    "tree, no overlap, page 64": pair.ddtree_flags(16, 8, "--disable-overlap-schedule", "--page-size", "64"),
    "chain, no overlap": pair.dflash_flags("--disable-overlap-schedule"),
}
# With overlap a turn of two tokens mostly ends before a step that would write the KV of its last one. One that ends
# with a frequent token mostly does so amid the tokens of a step.
STOPPED = {"max_new_tokens": 60, "stop_token_ids": [10, 13, 32]}
TURNS = [*({"max_new_tokens": tokens} for tokens in (2, 5, 2, 2, 9, 1)), STOPPED, {"max_new_tokens": 2}, STOPPED, {}]
ABORTED_BEFORE = 5


# Each fails without the mend; the first one stands for them where time counts.
FIRST, *OTHERS = VARIANTS


@pytest.fixture(scope="module", params=[FIRST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def server(request, tmp_path_factory):
    flags = [*VARIANTS[request.param], "--enable-streaming-session"]
    with launcher.running(pair.TARGET, tmp_path_factory.mktemp("sessions") / "log", flags) as up:
        yield up


def body(prompt: list[int], since: int = -1, sampling: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """A request, two tokens if nothing else is asked, with log-probabilities of the prompt's tokens from `since` on."""
    scores = {"return_logprob": True, "logprob_start_len": since}
    return {"input_ids": prompt, "sampling_params": launcher.greedy_sampling(2) | (sampling or {})} | scores | more


def begin_and_abort(server: launcher.Server, said: list[int], **more: Any) -> None:
    """A turn that is aborted after its first tokens."""
    answers = server.stream("/generate", body(said, -1, {"max_new_tokens": 1500}, rid="aborted", stream=True, **more))
    next(answers)
    pair.abort(server, "aborted")
    assert b'"abort"' in b"".join(answers)


def converse(server: launcher.Server, text: list[int]) -> tuple[list[int], dict[int, float]]:
    """A session of some turns: all its tokens, and the log-probabilities of those that the server wrote, by place."""
    session = server.post("/open_session", {"capacity_of_str_len": 10_000, "streaming": True})
    within = {"session_params": {"id": session}}
    tokens: list[int] = []
    scores: dict[int, float] = {}
    for turn, sampling in enumerate(TURNS):
        said = text[:40] if turn == 0 else text[40 + 3 * turn : 43 + 3 * turn]
        if turn == ABORTED_BEFORE:
            begin_and_abort(server, said, **within)
        answer = server.post("/generate", body(said, -1, sampling, **within))["meta_info"]
        assert answer["prompt_tokens"] == len(tokens) + len(said)
        assert turn in (0, ABORTED_BEFORE) or answer["cached_tokens"] >= len(tokens) - 1, "turns read KV of ones before"
        tokens += said
        for score, token, _ in answer["output_token_logprobs"]:
            scores[len(tokens)] = score
            tokens.append(token)
    server.post_text("/close_session", {"session_id": session})
    return tokens, scores


def test_turns_read_only_kv_that_was_written(server):
    for text in pair.held_out_prompts(3, lengths=(80, 80), seed=5):
        tokens, scores = converse(server, text)
        server.get("/flush_cache")
        anew = server.post("/generate", body(tokens, 0))["meta_info"]["input_token_logprobs"]
        assert scores == pytest.approx({place: anew[place][0] for place in scores}, abs=1e-4)


PROMPT = 50


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("answered", [1, 13, 14, 15, 16, 78, 79, 80])
@pytest.mark.parametrize("beyond", [-1, 0, 3], ids=["last token not written", "all written", "written past a stop"])
def test_what_a_turn_ends_with_is_kept_or_freed_once(page_size, answered, beyond):
    """At both sides of a page's end, with upstream's record of a session and the slots of a verify step in hand."""
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.session.streaming_session import StreamingSession
    from sglang_sm120.sessions import keep_written_kv

    def pages(tokens: int) -> int:
        return -(-tokens // page_size)

    said, reserved = PROMPT + answered, pages(PROMPT + answered + 20)
    kv = ReqKvInfo(req_pool_idx=0, kv_committed_len=said + beyond, kv_allocated_len=reserved * page_size)
    freed: list[int] = []  # upstream's allocators free all of a page that a slot is in

    def free_kv_row(_: ReqKvInfo, spans: list[tuple[int, int]]) -> None:
        freed.extend(page for begin, end in spans for page in range(begin // page_size, pages(end)))

    cache = types.SimpleNamespace(page_size=page_size, free_kv_row=free_kv_row)
    session = types.SimpleNamespace(streaming=True, session_id="one", finish_req=lambda _: None)
    turn = types.SimpleNamespace(
        session=session, kv=kv, origin_input_ids=[0] * PROMPT, output_ids=[0] * (answered + max(beyond, 0)),
        finished_len=answered, finished_reason=None, to_finish=None, detach_kv=lambda: None, lock=None, last_node=None,
    )  # fmt: skip
    sessions = StreamingSession(cache)
    sessions.take(turn)
    assert keep_written_kv(inspect.unwrap(StreamingSession.try_cache_finished_req), sessions, turn)
    found = sessions.try_match_prefix(types.SimpleNamespace(req=turn, key=[0] * (said + 3)))
    assert found.device_prefix_len == kv.kv_committed_len == kv.kv_allocated_len == said + min(beyond, 0)
    assert sorted(freed) == list(range(pages(found.device_prefix_len), reserved)), "none twice, and none that is read"

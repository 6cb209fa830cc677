"""Token ids that the model does not have are refused before they reach the scheduler."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
from sglang_sm120 import requests

MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=100))


def request(input_ids=None, media: bool = False, top: int | None = None, **sampling):
    return SimpleNamespace(
        input_ids=input_ids, sampling_params=sampling, contains_mm_input=lambda: media, top_logprobs_num=top
    )


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (request([5, 100]), r"input_ids has 100; .* 0 to 99"),
        (request([-1]), "input_ids has -1"),
        (request(["a"]), "input_ids has 'a'"),
        (request([True]), "input_ids has True"),
        (request([1.5]), r"input_ids has 1\.5"),
        (request([5], min_new_tokens=2, stop_token_ids=[100]), "stop_token_ids has 100"),
        (request([5], top=101), "top_logprobs_num is 101"),
        (request([5], top=-1), "top_logprobs_num is -1"),
        (request([]), "the prompt is empty"),
    ],
)
def test_refused(sent, says):
    with pytest.raises(ValueError, match=says):
        requests.check(MANAGER, sent, sent.input_ids)


@pytest.mark.parametrize(
    "sent",
    [
        request([0, 99]),
        request(None),
        request([], media=True),
        request([5], top=100),
        request([100], media=True),
        request([5], stop_token_ids=[100]),  # upstream only compares it
        request([5], min_new_tokens=2, stop_token_ids=[99]),
    ],
)
def test_left_to_upstream(sent):
    assert requests.check(MANAGER, sent, sent.input_ids) is None


def test_the_place_of_the_check_is_there():
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    assert list(inspect.signature(TokenizerManager._validate_one_request).parameters) == ["self", "obj", "input_ids"]

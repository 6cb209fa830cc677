"""Refuses requests that upstream lets through and that would end the scheduler, and with it every other request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def register() -> None:
    """Put the check before upstream's own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
    HookRegistry.register(target, check, HookType.BEFORE)


def check(tokenizer_manager: Any, request: Any, input_ids: list[int] | None) -> None:
    """Raise ValueError, which upstream answers with 400, for an empty prompt and for what the vocabulary does not have.

    input_ids: the prompt after the tokenizer. Looked at are the ids that the client sent (not where placeholders of
    media are still among them), the stop ids that `min_new_tokens` makes upstream write to the logits, and the number
    of log-probabilities.
    """
    vocabulary = tokenizer_manager.model_config.vocab_size
    if input_ids is not None and not len(input_ids) and not request.contains_mm_input():
        raise ValueError("the prompt is empty: send at least one token.")
    if request.input_ids and not request.contains_mm_input():
        _check_ids("input_ids", request.input_ids, vocabulary)
    sampling = request.sampling_params or {}
    if sampling.get("min_new_tokens") and sampling.get("stop_token_ids"):
        _check_ids("stop_token_ids", sampling["stop_token_ids"], vocabulary)
    top = getattr(request, "top_logprobs_num", None) or 0
    if not 0 <= top <= vocabulary:
        raise ValueError(f"top_logprobs_num is {top}; it must be 0 to the {vocabulary} tokens of the vocabulary.")


def _check_ids(name: str, ids: Sequence[int], vocabulary: int) -> None:
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocabulary:
        return  # without a Python step a token: prompts are long
    wrong = next(token for token in ids if type(token) is not int or not 0 <= token < vocabulary)
    raise ValueError(f"{name} has {wrong!r}; this model's token ids are the integers 0 to {vocabulary - 1}.")

"""Refuses requests that upstream lets through and that would end the scheduler, and with it every other request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def register() -> None:
    """Put the check before upstream's own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
    HookRegistry.register(target, check_token_ids, HookType.BEFORE)


def check_token_ids(tokenizer_manager: Any, request: Any, _input_ids: list[int] | None) -> None:
    """Raise ValueError, which upstream answers with 400, for token ids that the vocabulary does not have.

    Looked at are the ids that the client sent (not where media's placeholders are still among them), and the stop ids
    that `min_new_tokens` makes upstream write to the logits.
    """
    vocabulary = tokenizer_manager.model_config.vocab_size
    if request.input_ids and not request.contains_mm_input():
        _check("input_ids", request.input_ids, vocabulary)
    sampling = request.sampling_params or {}
    if sampling.get("min_new_tokens") and sampling.get("stop_token_ids"):
        _check("stop_token_ids", sampling["stop_token_ids"], vocabulary)


def _check(name: str, ids: Iterable[int], vocabulary: int) -> None:
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ValueError(f"{name} has {token!r}; this model's token ids are the integers 0 to {vocabulary - 1}.")

"""Prompts of text and what transformers makes of them in float32."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import pytest
import torch
from greedy_text import LENGTHS, NEW_TOKENS


@pytest.fixture(scope="session")
def prompts(tiny_model: Path) -> list[list[int]]:
    """Token ids of text, one prompt for each of LENGTHS."""
    from transformers import AutoTokenizer

    text = inspect.getsource(textwrap) + inspect.getsource(inspect)
    ids = AutoTokenizer.from_pretrained(tiny_model)(text).input_ids
    return [ids[17 * i : 17 * i + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="session")
def expected(tiny_model: Path, prompts: list[list[int]]) -> list[list[int]]:
    """NEW_TOKENS greedy tokens of each prompt."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False,
                                 eos_token_id=None, pad_token_id=0)  # fmt: skip
        answers.append(out[0, len(prompt) :].tolist())
    return answers

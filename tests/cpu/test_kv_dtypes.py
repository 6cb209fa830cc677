"""bf16 weights with bf16 and fp8 KV: prompt log-probabilities stay near transformers' in float32."""

from __future__ import annotations

import inspect
import textwrap

import pytest
import torch

from tools import server as launcher

# Mean absolute difference in nats; leaving attention out moves it by more than 0.5 on this model.
LIMITS = {"auto": 0.05, "fp8_e4m3": 0.12}


@pytest.fixture(scope="module")
def prompt(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)(inspect.getsource(textwrap)).input_ids[:400]


@pytest.fixture(scope="module")
def expected(tiny_model, prompt):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, 1:, None])[:, 0]


@pytest.mark.parametrize("kv_dtype", list(LIMITS))
def test_prompt_logprobs(tiny_model, prompt, expected, kv_dtype, tmp_path):
    flags = f"--dtype bfloat16 --kv-cache-dtype {kv_dtype} --chunked-prefill-size 128 --page-size 64".split()
    with launcher.running(tiny_model, tmp_path / "log", flags) as up:
        body = {"input_ids": prompt, "return_logprob": True, "logprob_start_len": 0}
        answer = up.post("/generate", body | {"sampling_params": {"temperature": 0, "max_new_tokens": 1}})
    got = torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])
    assert got.shape == expected.shape
    assert (got - expected).abs().mean() < LIMITS[kv_dtype]

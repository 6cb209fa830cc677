"""What the ops refuse before anything reaches a GPU, and what they hand over: the kernel's host code checks nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang_sm120 import ops

ROWS, HEADS, REQUESTS, Q_LEN = 6, 8, 3, 2


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_num_sms", lambda _: 188)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (12, 0))


def params(**changes: Any) -> ops._Params:
    """A verify of three requests by two rows, but for the changes."""
    q = changes.get("q", torch.zeros(ROWS, HEADS, 576, dtype=torch.bfloat16))
    given = {
        "q": q, "kv_pool": torch.zeros(16, 576, dtype=torch.bfloat16),
        "req_to_token": torch.zeros(4, 8, dtype=torch.int32), "req_pool_indices": torch.arange(REQUESTS),
        "kv_lens": torch.full((REQUESTS,), 5), "q_len": Q_LEN, "qo_indptr": None, "tree_mask": None, "workspace": None,
        "sm_scale": 1.0, "kv_scale": 1.0, "logit_cap": 0.0,
        "out": torch.zeros(*q.shape[:2], 512, dtype=torch.bfloat16), "lse": torch.zeros(q.shape[:2]),
    }  # fmt: skip
    return ops._params(*(given | changes).values())


def test_the_kernel_is_told_what_the_tensors_are() -> None:
    told = params()
    assert (told.batch, told.q_len, told.total_q, told.heads, told.mask_words) == (REQUESTS, Q_LEN, ROWS, HEADS, 0)
    assert (told.kv_lens_stride, told.req_pool_indices_stride) == (2, 2), "int64 is read by its lower half"
    assert (told.kv_stride_bytes, told.kv_is_fp8, told.req_to_token_stride) == (1152, 0, 8)
    words, lens = torch.zeros(ROWS, 1, dtype=torch.int32), torch.zeros(REQUESTS, dtype=torch.int32)
    told = params(kv_pool=torch.zeros(16, 576).to(torch.float8_e4m3fn), tree_mask=words, kv_lens=lens)
    assert (told.kv_stride_bytes, told.kv_is_fp8, told.mask_words, told.kv_lens_stride) == (576, 1, 1, 1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_lens": torch.zeros(4, dtype=torch.int64), "req_pool_indices": torch.arange(4)}, "6 rows for 4 requests"),
        ({"req_pool_indices": torch.arange(2)}, "one entry per request"),
        ({"q_len": 0}, "of q_len 0"),
        ({"q_len": None}, "exactly one of q_len and qo_indptr"),
        ({"qo_indptr": torch.zeros(4, dtype=torch.int32)}, "exactly one of q_len and qo_indptr"),
        ({"q_len": None, "qo_indptr": torch.zeros(3, dtype=torch.int32)}, r"must be int32 \[4\]"),
        ({"q_len": None, "qo_indptr": torch.zeros(4, dtype=torch.int64)}, r"must be int32 \[4\]"),
        ({"tree_mask": torch.zeros(5, 1, dtype=torch.int32)}, "fewer rows than q"),
        ({"tree_mask": torch.zeros(ROWS, 0, dtype=torch.int32)}, "0 words for q_len 2"),
        ({"tree_mask": torch.zeros(ROWS, 1, dtype=torch.int64)}, "must be contiguous int32 or uint32"),
        ({"q": torch.zeros(ROWS, 129, 576, dtype=torch.bfloat16)}, "129 heads; 1 to 128"),
        ({"q": torch.zeros(ROWS, HEADS, 512, dtype=torch.bfloat16)}, r"must be \[T, H, 576\]"),
        ({"q": torch.zeros(ROWS, HEADS, 576)}, "must be bfloat16"),
        ({"kv_pool": torch.zeros(16, 576, dtype=torch.float8_e5m2)}, "must be bfloat16 or float8_e4m3fn"),
        ({"kv_pool": torch.zeros(16, 512, dtype=torch.bfloat16)}, "must be rows of 576 values"),
        ({"req_to_token": torch.zeros(4, 8, dtype=torch.int64)}, r"must be int32 \[requests, context\]"),
        ({"kv_lens": torch.zeros(REQUESTS, dtype=torch.float32)}, "kv_lens is torch.float32"),
        ({"kv_lens": torch.zeros(2 * REQUESTS, dtype=torch.int64)[::2]}, "kv_lens must be contiguous"),
        ({"out": torch.zeros(ROWS, HEADS, 576, dtype=torch.bfloat16)}, r"must be bfloat16 \[6, 8, 512\]"),
        ({"lse": torch.zeros(HEADS, ROWS)}, r"must be float32 \[6, 8\]"),
    ],
)
def test_arguments_that_do_not_agree_are_named(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        params(**changes)


def test_ragged_rows_without_a_request_are_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    ragged = {"q_len": None, "qo_indptr": torch.zeros(1, dtype=torch.int32)}
    with pytest.raises(ValueError, match="q has 6 rows, but kv_lens names no request"):
        params(kv_lens=none, req_pool_indices=none, **ragged)

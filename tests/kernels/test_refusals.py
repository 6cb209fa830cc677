"""What the ops refuse before anything reaches a GPU, where the kernel's own host code would not come back."""

from __future__ import annotations

import pytest
import torch
from sglang_sm120 import ops


def test_ragged_rows_without_a_request_are_refused() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    rows = torch.zeros(3, 8, 576, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="q has 3 rows, but kv_lens names no request"):
        ops._params(
            rows, torch.zeros(4, 576, dtype=torch.bfloat16), torch.zeros(1, 4, dtype=torch.int32), none, none,
            None, torch.zeros(1, dtype=torch.int32), None, None, 1.0, 1.0, 0.0,
            torch.zeros(3, 8, 512, dtype=torch.bfloat16), torch.zeros(3, 8),
        )  # fmt: skip

"""What tests of servers share: upstream's switch for retraction, and reading `/metrics`."""

from __future__ import annotations

import re


def retract_every(steps: int) -> dict[str, str]:
    """Environment in which upstream retracts a request now and then, as if the pool were full, and starts it again."""
    return {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": str(steps)}


def metric(text: str, name: str) -> float:
    """The sum of a metric's samples in the text of `/metrics`, over all labels that the name leaves open."""
    return sum(float(sample) for sample in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))

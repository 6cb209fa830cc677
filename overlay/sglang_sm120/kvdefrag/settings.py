"""What the environment asks for. Plugins have no server flags of their own, so these are variables, as SGLang's are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

EXTENT = "SGLANG_SM120_KV_EXTENT"
COMPACT = "SGLANG_SM120_KV_COMPACT"
COMPACT_BELOW = "SGLANG_SM120_KV_COMPACT_BELOW"
COMPACT_MS = "SGLANG_SM120_KV_COMPACT_MS"
TREE_CORE = "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"


class When(Enum):
    """When compaction runs on its own; the admin endpoint starts it in every mode but off."""

    OFF = "off"
    IDLE = "idle"
    """when the server has nothing to do"""
    AUTO = "auto"
    """when idle, and while serving if contiguity has fallen below the threshold"""
    EVERY_STEP = "every-step"
    """before every scheduler step: for tests"""


@dataclass(frozen=True)
class Settings:
    """Everything is off unless asked for."""

    extent_tokens: int = 0
    compact: When = When.OFF
    compact_below: float = 0.9
    """contiguity, 0 to 1, under which auto compacts"""
    compact_ms: float = 2.0
    """time that one pass may take to move KV, milliseconds"""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read and check the variables; ValueError names the one that is wrong and what it may be."""
        when = environment.get(COMPACT, When.OFF.value)
        if when not in {w.value for w in When}:
            raise ValueError(f"{COMPACT}={when}: it must be one of {', '.join(w.value for w in When)}.")
        if when != When.OFF.value and environment.get(TREE_CORE, "python") != "python":
            raise ValueError(
                f"{COMPACT}={when} needs the Python tree core, because the Rust one cannot be told that KV has moved; "
                f"unset {TREE_CORE} or set it to python."
            )
        return cls(
            extent_tokens=int(_number(environment, EXTENT, "0", 0, 1 << 20, "tokens of an extent, 0 for none", 1)),
            compact=When(when),
            compact_below=_number(environment, COMPACT_BELOW, "0.9", 0, 1, "a contiguity"),
            compact_ms=_number(environment, COMPACT_MS, "2", 0.01, 1000, "milliseconds of moving a pass"),
        )


def _number(
    environment: Mapping[str, str], name: str, default: str, least: float, most: float, meaning: str, step: float = 0
) -> float:
    """The variable's value, from `least` to `most`, and a multiple of `step` if one is given."""
    text = environment.get(name, default)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most or (step and value % step):
        kind = "whole number" if step else "number"
        raise ValueError(f"{name}={text}: it must be a {kind} from {least} to {most}: {meaning}.")
    return value

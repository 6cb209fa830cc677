"""Expert load through SGLang's own expert-distribution recorder: start, stop, dump, read."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sglang_sm120 import client

PATTERN = "expert_distribution_recorder_*.pt"


@dataclass(frozen=True)
class Load:
    """What was recorded.

    Attributes:
        tokens: `[steps, layers, experts]` int64, how many tokens each step sent to each expert. Steps in which nothing
            was routed and layers without experts are left out.
        layers: number of each of these layers in the model.
    """

    tokens: torch.Tensor
    layers: list[int]


def read(path: Path, copies: int) -> Load:
    """A dump of the recorder's modes `stat` and `stat_approx`.

    copies: ranks that counted each token. Upstream adds up all ranks, and under TP all of them route every token.
    """
    if not path.is_file():
        raise ValueError(f"--record {path}: there is no such file")
    try:
        dump = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its unpickler meets
        raise ValueError(f"--record {path}: not a dump of the expert-distribution recorder") from error
    if not isinstance(dump, dict) or "logical_count" not in dump:
        raise ValueError(f"--record {path}: no logical_count; record with --expert-distribution-recorder-mode stat")
    counts = dump["logical_count"]
    if not isinstance(counts, torch.Tensor) or counts.dim() != 3:
        raise ValueError(f"--record {path}: its logical_count is no tensor [steps, layers, experts]")
    counts = counts.long()
    counts = counts[counts.sum((1, 2)) > 0]
    if len(counts) == 0:
        raise ValueError(f"no token was routed while {path} was recorded; send requests meanwhile")
    if (counts % copies).any():
        raise ValueError(f"{path}: counts are no multiples of --copies {copies}; give the number of ranks that counted")
    with_experts = counts.sum((0, 2)) > 0
    return Load(counts[:, with_experts] // copies, with_experts.nonzero().flatten().tolist())


def expert_weights(model: Path) -> int:
    """Weights of one routed expert of one layer, from config.json: gate, up and down projection."""
    try:
        config = json.loads((model / "config.json").read_text())
        config = config.get("text_config", config)
        return 3 * config["hidden_size"] * config["moe_intermediate_size"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"--model {model}: no config.json with hidden_size and moe_intermediate_size: {error}"
        ) from None


class RecordingServer:
    """A running server on this machine (its dumps are read from the disk)."""

    def __init__(self, url: str, api_key: str | None, dump_dir: Path | None) -> None:
        self._url, self._api_key = url, api_key
        self._dump_dir = dump_dir or Path(os.environ.get("SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR", "/tmp"))
        self._arguments: dict[str, Any] = client.server_info(url, api_key)
        if self._arguments.get("expert_distribution_recorder_mode") not in ("stat", "stat_approx"):
            raise RuntimeError(f"{url} records no expert load; start it with --expert-distribution-recorder-mode stat")

    @property
    def ranks(self) -> int:
        """GPUs that share the experts."""
        return self._arguments["tp_size"]

    @property
    def copies(self) -> int:
        """How many ranks count each token: all, unless an all-to-all backend gives each its own tokens."""
        return self._arguments["tp_size"] if self._arguments.get("moe_a2a_backend", "none") == "none" else 1

    @property
    def model(self) -> Path | None:
        """The model's folder, if it lies on this machine."""
        folder = Path(self._arguments["model_path"])
        return folder if (folder / "config.json").exists() else None

    def record(self, seconds: float) -> Path:
        """Record for so long what the server serves anyway; the file it wrote."""
        before = set(self._dump_dir.glob(PATTERN))
        print(f"recording for {seconds:g} s", file=sys.stderr)
        self._ask("start_expert_distribution_record")
        try:
            time.sleep(seconds)
        finally:
            self._ask("stop_expert_distribution_record")
        print("the server writes its record", file=sys.stderr)
        self._ask("dump_expert_distribution_record")
        written = set(self._dump_dir.glob(PATTERN)) - before
        if not written:
            raise RuntimeError(
                f"the server wrote no dump to {self._dump_dir}: give --dump-dir the server's "
                "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR, and run this on the server's machine"
            )
        return max(written, key=lambda path: path.stat().st_mtime)

    def _ask(self, endpoint: str) -> None:
        client.ask(self._url, endpoint, self._api_key)

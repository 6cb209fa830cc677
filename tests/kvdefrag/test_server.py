"""The CPU server with compaction forced before every step, extents on or off: the same greedy tokens as without."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from tools import server as launcher

NEW_TOKENS = 48
# Too small for all requests at once: upstream must retract some of them and start them again.
FLAGS = "--dtype float32 --enable-metrics --max-total-tokens 1536 --chunked-prefill-size 128 --schedule-conservativeness 0.1"
CASES = {
    "page1": ("1", {}),
    "page1-extents": ("1", {"SGLANG_SM120_KV_EXTENT": "16"}),
    "page64": ("64", {}),
}


def prompts() -> list[list[int]]:
    """Twelve prompts of 3 to 200 tokens; half of them share a prefix."""
    random = Random(0)
    shared = [random.randrange(300) for _ in range(90)]
    lengths = [3, 200, 64, 65, 20, 130, 1, 40, 63, 100, 7, 33]
    return [(shared if i % 2 else []) + [random.randrange(300) for _ in range(n)] for i, n in enumerate(lengths)]


def serve(model: Path, log: Path, page: str, env: dict[str, str]) -> tuple[list, dict, str]:
    """Outputs of all prompts, cold and then with the cache full; the scheduler's `/server_info`; the metrics."""
    with launcher.running(model, log, [*FLAGS.split(), "--page-size", page], env=env) as up:
        answers = [up.generate(prompts(), NEW_TOKENS) for _ in range(2)]
        states = json.loads(up.get("/server_info"))["internal_states"]
        return [[a["output_ids"] for a in answer] for answer in answers], states[0], up.get("/metrics")


@pytest.fixture(scope="module")
def without(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list:
    log = tmp_path_factory.mktemp("without") / "log"
    outputs, state, _ = serve(tiny_model, log, "1", {})
    assert "sm120_kv" not in state, "compaction is off unless asked for"
    assert "etract" in log.read_text(), "this load must make upstream retract"
    return outputs


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_without_compaction(case, without, tiny_model, tmp_path):
    page, env = CASES[case]
    log = tmp_path / "log"
    outputs, state, metrics = serve(tiny_model, log, page, env | {"SGLANG_SM120_KV_COMPACT": "every-step"})
    assert outputs == without
    done = state["sm120_kv"]
    assert done["refused_because"] is None
    assert done["passes"] > 10 and done["units_moved"] > 0 and len(done["map_before"]) == len(done["map_after"])
    assert "etract" in log.read_text()
    assert "sm120:kv_compaction_passes_total" in metrics and "sm120:kv_contiguity" in metrics

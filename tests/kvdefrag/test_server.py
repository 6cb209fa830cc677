"""The CPU server with compaction forced before every step, extents on or off: the same greedy tokens as without."""

from __future__ import annotations

import inspect
import json
import textwrap
from pathlib import Path
from random import Random

import pytest

from tools import server as launcher

NEW_TOKENS = 48
# Too small for all requests at once: upstream must retract some of them and start them again.
FLAGS = "--dtype float32 --enable-metrics --max-total-tokens 1536 --chunked-prefill-size 128".split()
FLAGS += "--schedule-conservativeness 0.1 --context-length 1024".split()
CASES = {
    "page1": ("1", {}),
    "page1-extents": ("1", {"SGLANG_SM120_KV_EXTENT": "16"}),
    "page64": ("64", {}),
}
PAIR = Path(__file__).resolve().parent.parent / "fixtures" / "pair"


@pytest.fixture(scope="module", params=["plain", "ddtree"])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> tuple[Path, list[str]]:
    """Checkpoint and flags: the random one without speculation, or the trained pair with draft trees."""
    if request.param == "plain":
        return tiny_model, []
    if not PAIR.exists():
        pytest.skip(f"no trained pair at {PAIR}: tools/train_pair.py makes it")
    flags = (
        f"--speculative-algorithm DDTREE --speculative-draft-model-path {PAIR}/drafter --speculative-ddtree-budget 12"
    )
    return PAIR / "target", flags.split()


def prompts(checkpoint: Path) -> list[list[int]]:
    """Twelve prompts of 3 to 290 tokens of source text; half of them share a prefix."""
    from transformers import AutoTokenizer

    random = Random(0)
    ids = AutoTokenizer.from_pretrained(checkpoint)(inspect.getsource(textwrap)).input_ids
    lengths = [3, 200, 64, 65, 20, 130, 5, 40, 63, 100, 7, 33]
    starts = [random.randrange(len(ids) - n) for n in lengths]
    return [(ids[:90] if i % 2 else []) + ids[a : a + n] for i, (a, n) in enumerate(zip(starts, lengths, strict=True))]


def serve(model: tuple[Path, list[str]], log: Path, page: str, env: dict[str, str]) -> tuple[list, dict, str]:
    """Outputs of all prompts, cold and then with the cache full; the scheduler's `/server_info`; the metrics."""
    checkpoint, flags = model
    asked = prompts(checkpoint)
    with launcher.running(checkpoint, log, [*FLAGS, *flags, "--page-size", page], env=env) as up:
        answers = [up.generate(asked, NEW_TOKENS) for _ in range(2)]
        if flags:
            lengths = [a["meta_info"]["spec_accept_length"] for a in answers[0]]
            assert sum(lengths) / len(lengths) > 1.5, f"drafts must be accepted and rejected: {lengths}"
        states = json.loads(up.get("/server_info"))["internal_states"]
        assert "etract" in log.read_text(), "this load must make upstream retract"
        return [[a["output_ids"] for a in answer] for answer in answers], states[0], up.get("/metrics")


@pytest.fixture(scope="module")
def without(model: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> list:
    outputs, state, _ = serve(model, tmp_path_factory.mktemp("without") / "log", "1", {})
    assert "sm120_kv" not in state, "compaction is off unless asked for"
    return outputs


@pytest.mark.parametrize("case", CASES)
def test_outputs_equal_those_without_compaction(case, model, without, tmp_path):
    page, env = CASES[case]
    outputs, state, metrics = serve(model, tmp_path / "log", page, env | {"SGLANG_SM120_KV_COMPACT": "every-step"})
    assert outputs == without
    done = state["sm120_kv"]
    assert done["refused_because"] is None
    assert done["passes"] > 10 and done["units_moved"] > 0 and len(done["map_before"]) == len(done["map_after"])
    assert "sm120:kv_compaction_passes_total" in metrics and "sm120:kv_contiguity" in metrics

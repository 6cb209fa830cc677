"""The CPU server with compaction forced before every step, extents on or off: the same greedy tokens as without."""

from __future__ import annotations

import inspect
import json
import textwrap
import time
import urllib.error
import urllib.request
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
from served import metric, retract_every
from sglang_sm120.kvdefrag import kv_map

from tools import server as launcher
from tools.pair import DDTREE_FLAGS, TARGET

NEW_TOKENS = 24
ADMIN_KEY = "secret"
FLAGS = (
    "--dtype float32 --enable-metrics --max-total-tokens 1024 --chunked-prefill-size 128 --context-length 1024 "
    f"--admin-api-key {ADMIN_KEY}"
)
CASES = {
    "page1": ("1", {}),
    "page64": ("64", {}),
    "page1-extents": ("1", {"SGLANG_SM120_KV_EXTENT": "16"}),
}


@pytest.fixture(scope="module", params=["ddtree", pytest.param("plain", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tiny_model: Path) -> tuple[Path, list[str]]:
    """Checkpoint and flags: the trained pair with draft trees, or the random one without speculation."""
    if request.param == "plain":
        return tiny_model, []
    return TARGET, [*DDTREE_FLAGS, "--speculative-ddtree-budget", "12"]


def prompts(checkpoint: Path) -> list[list[int]]:
    """Eight prompts of 3 to 290 tokens of source text; half of them share a prefix."""
    from transformers import AutoTokenizer

    random = Random(0)
    ids = AutoTokenizer.from_pretrained(checkpoint)(inspect.getsource(textwrap)).input_ids
    lengths = [3, 200, 64, 65, 20, 130, 5, 40]
    starts = [random.randrange(len(ids) - n) for n in lengths]
    return [(ids[:90] if i % 2 else []) + ids[a : a + n] for i, (a, n) in enumerate(zip(starts, lengths, strict=True))]


def serve(
    model: tuple[Path, list[str]],
    log: Path,
    page: str,
    env: dict[str, str],
    then: Callable[[launcher.Server], None] = lambda _: None,
) -> tuple[list, float, dict, str]:
    """Of all prompts, cold and then with the cache full: outputs, tokens a step. The server's state and metrics."""
    checkpoint, flags = model
    asked = prompts(checkpoint)
    served_with = [*FLAGS.split(), *flags, "--page-size", page]
    with launcher.running(checkpoint, log, served_with, env=retract_every(5) | env) as up:
        answers = [up.generate(asked, NEW_TOKENS) for _ in range(2)]
        steps = [a["meta_info"].get("spec_verify_ct", NEW_TOKENS) for answer in answers for a in answer]
        assert any(a["meta_info"]["cached_tokens"] > 0 for a in answers[1]), "the cache must be hit"
        state, metrics = up.info()["internal_states"][0], up.get("/metrics")
        assert metric(metrics, "sglang:num_retracted_requests_total") > 0, "this load must make upstream retract"
        then(up)
        tokens_a_step = len(steps) * NEW_TOKENS / sum(steps)
        return [[a["output_ids"] for a in answer] for answer in answers], tokens_a_step, state, metrics


@pytest.fixture(scope="module")
def without(model: tuple[Path, list[str]], tmp_path_factory: pytest.TempPathFactory) -> tuple[list, float]:
    outputs, tokens_a_step, state, _ = serve(model, tmp_path_factory.mktemp("without") / "log", "1", {})
    assert "sm120_kv" not in state, "compaction is off unless asked for"
    assert not model[1] or tokens_a_step > 1.5, "drafts must be accepted and rejected"
    return outputs, tokens_a_step


@pytest.mark.parametrize("case", ["page1", "page64", pytest.param("page1-extents", marks=pytest.mark.slow)])
def test_outputs_equal_those_without_compaction(case, model, without, tmp_path):
    page, env = CASES[case]
    env = env | {"SGLANG_SM120_KV_COMPACT": "every-step"}
    show = partial(operate, tmp_path / "kv.png")
    outputs, tokens_a_step, state, metrics = serve(model, tmp_path / "log", page, env, show)
    assert outputs == without[0]
    assert tokens_a_step == pytest.approx(without[1], rel=0.03), "the drafter's KV has not moved with the target's"
    done = state["sm120_kv"]
    assert done["refused_because"] is None
    assert done["passes"] > 10 and done["units_moved"] > 0 and len(done["map_before"]) == len(done["map_after"])
    assert metric(metrics, "sm120:kv_compaction_passes_total") == done["passes"] and "sm120:kv_contiguity" in metrics


def operate(picture: Path, up: launcher.Server) -> None:
    """Without the admin key compaction cannot be asked for; with it it can, and `kv-map` has its picture."""
    assert ask(up.url, None) == 401
    assert ask(up.url, ADMIN_KEY) == [True]
    kv_map.run(Namespace(url=up.url, out=picture, api_key=ADMIN_KEY))
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_idle_time_compacts(tiny_model, tmp_path):
    env = {"SGLANG_SM120_KV_COMPACT": "idle"}
    picture = tmp_path / "kv.png"
    with launcher.running(tiny_model, tmp_path / "log", FLAGS.split(), env=env) as up:
        up.generate(prompts(tiny_model), NEW_TOKENS)
        deadline = time.monotonic() + 60
        while not (passes := compaction(up)["passes"]) and time.monotonic() < deadline:
            time.sleep(0.5)
        kv_map.run(Namespace(url=up.url, out=picture, api_key=ADMIN_KEY))
    assert passes, "nothing was compacted"
    assert picture.read_bytes().startswith(b"\x89PNG")


def compaction(up: launcher.Server) -> dict:
    return up.info()["internal_states"][0]["sm120_kv"]


def ask(url: str, key: str | None) -> list[bool] | int:
    """Ask for compaction: what each scheduler answered, or the HTTP status of a refusal."""
    body = json.dumps({"server_args": {"sm120_kv_compact": 1}}).encode()
    request = urllib.request.Request(f"{url}/set_internal_state", body, {"Content-Type": "application/json"})
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return error.code

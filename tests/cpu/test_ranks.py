"""Two ranks of the CPU server, each a process: the tokens of one, in float32."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path

import pair
import pytest
from served import metric, retract_every

from tools import server as launcher

NEW_TOKENS = 24
CORES = sorted(os.sched_getaffinity(0))
# Upstream wants a core named for each rank, and starts NCCL, which comes with torch, on CPU ranks unless it finds none.
RANKS_ENV = {"SGLANG_CPU_OMP_THREADS_BIND": f"{CORES[0]}|{CORES[-1]}", "SGLANG_NCCL_SO_PATH": "none"}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return pair.held_out_prompts(8)


@pytest.fixture(scope="module")
def alone(prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What one rank answers, without speculation."""
    with launcher.running(pair.TARGET, tmp_path_factory.mktemp("alone") / "log", pair.FLAGS) as server:
        return tokens(server.generate(prompts, NEW_TOKENS))


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def two_ranks(log: Path, flags: list[str], env: dict[str, str]) -> AbstractContextManager[launcher.Server]:
    return launcher.running(pair.TARGET, log, [*flags, "--tp-size", "2", "--enable-metrics"], env=RANKS_ENV | env)


def test_tensor_parallel_trees_of_adaptive_width_while_kv_moves(tmp_path, prompts, alone):
    """Ranks take one width and one draft a step, accept the same path and move the same KV, or tokens would differ."""
    flags = pair.ddtree_flags(12, 8, "--speculative-ddtree-adaptive")
    unrest = {"SGLANG_SM120_KV_COMPACT": "every-step"} | retract_every(5)
    with two_ranks(tmp_path / "log", flags, unrest) as server:
        cold, cached = (server.generate(prompts, NEW_TOKENS) for _ in range(2))
        state, metrics = server.info()["internal_states"][0], server.get("/metrics")
    assert tokens(cold) == tokens(cached) == alone
    assert any(answer["meta_info"]["cached_tokens"] for answer in cached)
    assert max(answer["meta_info"]["spec_accept_length"] for answer in cold) > 1.5, "drafts must be accepted"
    assert state["sm120_kv"]["refused_because"] is None and state["sm120_kv"]["passes"] > 10
    assert metric(metrics, "sm120:kv_compaction_passes_total") == state["sm120_kv"]["passes"], "one rank counts"
    assert metric(metrics, "sglang:num_retracted_requests_total") > 0, "this load must make upstream retract"


def test_data_parallel_attention_with_and_without_an_idle_rank(tmp_path, prompts, alone):
    """A prompt that is alone leaves one rank idle; of eight at once each rank has four, of lengths of its own."""
    with two_ranks(tmp_path / "log", [*pair.FLAGS, "--dp-size", "2", "--enable-dp-attention"], {}) as server:
        one_by_one = [server.generate([prompt], NEW_TOKENS)[0] for prompt in prompts]
        together = server.generate(prompts, NEW_TOKENS)
        ranks = len(server.info()["internal_states"])
    assert ranks == 2
    assert tokens(one_by_one) == tokens(together) == alone


@pytest.mark.slow
def test_pipeline_parallel_ranks_hold_their_layers(tmp_path, prompts, alone):
    flags = [*pair.FLAGS, "--pp-size", "2"]
    with launcher.running(pair.TARGET, tmp_path / "log", flags, env=RANKS_ENV) as server:
        cold, cached = (server.generate(prompts, NEW_TOKENS) for _ in range(2))
    assert tokens(cold) == tokens(cached) == alone

"""moe-balance: reading dumps, the cost model against a plain restatement of it, EPLB, and a real recording."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from sglang_sm120 import cli
from sglang_sm120.moe_balance import cost, recording, report

from tests.cpu.answering import answering
from tools import server
from tools.pair import TARGET

GPU = cost.Gpu(read_gbps=1600, tflops=400, weight_bytes=2, tile_tokens=64)


def dump(path: Path, counts: torch.Tensor) -> Path:
    torch.save({"rank": 0, "logical_count": counts.int(), "average_utilization_rate_over_window": None}, path)
    return path


def run(*words: object) -> int:
    with pytest.raises(SystemExit) as end:
        cli.main(["moe-balance", *map(str, words)])
    return end.value.code or 0


def skewed(steps: int = 24, layers: int = 3, experts: int = 16, tokens: int = 4096) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    chances = torch.randn(layers, experts, generator=generator).exp()
    drawn = torch.stack([torch.multinomial(chances, tokens, True, generator=generator) for _ in range(steps)])
    return torch.nn.functional.one_hot(drawn, experts).sum(2)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=40), st.sampled_from([1, 16, 64]), st.floats(0.5, 2))
def test_cost_is_one_read_or_the_products_of_full_tiles(tokens, tile, weight_bytes):
    gpu = cost.Gpu(1600, 400, weight_bytes, tile)
    read_s = weight_bytes / 1600e9
    product_s = 2 / 400e12
    for n, got in zip(tokens, gpu.cost(torch.tensor(tokens)).tolist(), strict=True):
        want = 0 if n == 0 else max(read_s, math.ceil(n / tile) * tile * product_s) / read_s
        assert got == pytest.approx(want, rel=1e-12)


def test_even_load_costs_nothing_extra():
    even = torch.full((5, 2, 16), 300)
    tp = cost.tensor_parallel(even, 4, GPU)
    assert cost.expert_parallel(even, 4, GPU) == pytest.approx(tp)
    assert cost.even_experts(even, 4, GPU) == pytest.approx(tp)


def test_ep_waits_for_the_slowest_rank_of_each_layer():
    tokens = torch.zeros(1, 2, 8, dtype=torch.int64)
    tokens[0, 0, 0] = 100  # layer 0: only rank 0 works; layer 1: only rank 3
    tokens[0, 1, 7] = 100
    assert cost.expert_parallel(tokens, 4, GPU) == 2.0
    assert cost.tensor_parallel(tokens, 4, GPU) == 0.5


def test_under_tp_fewer_experts_hit_is_fewer_reads():
    spread, packed = torch.ones(1, 1, 8, dtype=torch.int64), torch.tensor([[[8, 0, 0, 0, 0, 0, 0, 0]]])
    assert cost.tensor_parallel(spread, 8, GPU) == cost.even_experts(packed, 8, GPU) == 1.0
    assert cost.tensor_parallel(packed, 8, GPU) == 0.125


@pytest.mark.parametrize("redundant", [0, 4, 16])
def test_eplb_keeps_every_token_and_evens_the_ranks(redundant):
    tokens = skewed()
    placed = cost.rebalanced(tokens, 4, redundant)
    judged = tokens[12:]
    assert placed.shape == (12, 3, 16 + redundant)
    assert torch.equal(placed.sum(-1), judged.sum(-1))
    before, after = (cost.imbalance(cost.by_rank(x, 4)).mean() for x in (judged, placed))
    assert after < before
    assert cost.expert_parallel(placed, 4, GPU) < cost.expert_parallel(judged, 4, GPU)


def test_read_leaves_out_idle_steps_dense_layers_and_copies(tmp_path):
    counts = torch.zeros(6, 3, 4)
    counts[1, 1:] = 8
    counts[4, 2, 0] = 16
    load = recording.read(dump(tmp_path / "d.pt", counts), copies=8)
    assert load.layers == [1, 2]
    assert load.tokens.tolist() == [[[1, 1, 1, 1], [1, 1, 1, 1]], [[0, 0, 0, 0], [2, 0, 0, 0]]]


@pytest.mark.parametrize(
    ("write", "words", "says"),
    [
        (lambda p: None, [], "there is no such file"),
        (lambda p: p.write_text("no"), [], "not a dump of the expert-distribution recorder"),
        (lambda p: torch.save({"records": []}, p), [], "--expert-distribution-recorder-mode stat"),
        (lambda p: torch.save({"logical_count": [1]}, p), [], "no tensor [steps, layers, experts]"),
        (lambda p: dump(p, torch.ones(2, 8)), [], "no tensor [steps, layers, experts]"),
        (lambda p: dump(p, torch.zeros(2, 2, 8)), [], "no token was routed"),
        (lambda p: dump(p, torch.ones(2, 2, 8)), ["--copies", 2], "no multiples of --copies 2"),
        (
            lambda p: dump(p, torch.ones(2, 2, 8)),
            ["--ranks", 3],
            "--ranks 3: 8 experts do not divide by it",
        ),
        (
            lambda p: dump(p, torch.ones(2, 2, 8)),
            ["--ranks", 4, "--redundant", 3],
            "--redundant 3: 8 experts and 3 more",
        ),
        (
            lambda p: dump(p, torch.ones(2, 2, 8)),
            ["--ranks", 4, "--redundant", 32, 1_000_000],
            "--redundant 1000000: at most 32, a further copy of each of 8 experts for each of --ranks 4",
        ),
        (lambda p: dump(p, torch.ones(2, 2, 8)), ["--model", "nowhere"], "--model nowhere: no config.json"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, capsys, write, words, says):
    write(tmp_path / "d.pt")
    assert run("--record", tmp_path / "d.pt", "--out", tmp_path / "out", *words) == 1
    error = capsys.readouterr().err
    assert says in error
    assert error.startswith("error: ")
    assert len(error.splitlines()) == 1
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("flag", ["--copies", "--ranks", "--tile", "--read-gbps", "--tflops", "--weight-bytes"])
@pytest.mark.parametrize("value", ["0", "-2", "nan", "inf", "x"])
def test_a_size_or_rate_that_is_none_is_refused(flag, value, capsys):
    assert run(flag, value) == 2
    assert f"argument {flag}: {value} is no " in capsys.readouterr().err


def test_a_dot_in_the_name_is_no_suffix(tmp_path):
    assert run("--record", dump(tmp_path / "d.pt", skewed()), "--out", tmp_path / "run-1.2") == 0
    assert {path.name for path in tmp_path.glob("run*")} == {"run-1.2.json", "run-1.2.png"}


def test_a_dump_becomes_json_picture_and_text(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 7168, "moe_intermediate_size": 2048}))
    tokens = skewed()
    words = ["--record", dump(tmp_path / "d.pt", tokens), "--ranks", 4, "--model", tmp_path, "--out", tmp_path / "out"]
    assert run(*words) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["tokens"] == tokens.sum(0).tolist()
    assert found["ep"]["over_even"] > found["ep_eplb_0"]["over_even"] > found["ep_eplb_4"]["over_even"] > 1
    read_ms = 3 * 7168 * 2048 * 2 / 1600e9 * 1e3
    assert found["ep"]["ms_a_step"] == pytest.approx(found["ep"]["reads_a_step"] * read_ms, rel=1e-2)
    picture = Image.open(tmp_path / "out.png")
    hottest = int(tokens.sum(0)[0].argmax())
    red, _, blue = picture.getpixel((report.MARGIN_PIXELS + 64 * hottest + 32, report.LEGEND_PIXELS + 5))
    assert red > blue
    said = capsys.readouterr().out
    assert "EP, EPLB and 4 redundant" in said
    assert "GPUs of 1600 GB/s and 400 TFLOP/s (RTX PRO 6000, assumed), 2 bytes a weight\n" in said
    share = 100 * found["ep"]["lost_ms"] / found["ep"]["ms_a_step"]
    assert f"ms, {share:.1f}% of it lost to uneven load" in said


def test_a_load_that_is_even_or_better_loses_nothing(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "moe_intermediate_size": 8}))
    even = dump(tmp_path / "d.pt", torch.full((4, 2, 16), 300))
    words = ["--ranks", 4, "--redundant", 0, "--model", tmp_path, "--out", tmp_path / "out", "--tflops", 200]
    assert run("--record", even, *words) == 0
    said = capsys.readouterr().out
    assert "GPUs of 1600 GB/s and 200 TFLOP/s, 2 bytes a weight\n" in said
    assert said.count("nothing of it lost") == 3 and "%" not in said and "0.000 ms" not in said


def test_a_server_that_records_nothing_is_told_how(capsys):
    with answering('{"expert_distribution_recorder_mode": null, "internal_states": [{}]}') as url:
        assert run("--url", url) == 1
    assert "start it with --expert-distribution-recorder-mode stat" in capsys.readouterr().err


def test_no_server(capsys):
    assert run("--url", f"http://127.0.0.1:{server.free_port()}") == 1
    assert "no server answers" in capsys.readouterr().err


def test_the_trained_pair_recorded_while_it_serves(tmp_path, capsys):
    """Through upstream's endpoints with an admin key, on the CPU engine."""
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    flags = ["--dtype", "float32", "--context-length", "2048", "--admin-api-key", "secret",
             "--expert-distribution-recorder-mode", "stat"]  # fmt: skip
    env = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(dumps)}
    with server.running(TARGET, tmp_path / "log", flags, env) as up:
        words = ["--url", up.url, "--dump-dir", dumps, "--seconds", 2, "--ranks", 2, "--out", tmp_path / "out"]
        assert run(*words, "--api-key", "wrong") == 1
        assert "give --api-key" in capsys.readouterr().err
        prompts = [list(range(10 + i, 50 + i)) for i in range(4)]
        asking = threading.Timer(0.5, lambda: up.generate(prompts, 8))
        asking.start()
        assert run(*words, "--api-key", "secret") == 0
        asking.join()
    found = json.loads((tmp_path / "out.json").read_text())
    config = json.loads((TARGET / "config.json").read_text())
    # Each prompt token and all but the last new one pass every MoE layer once.
    pairs = config["num_experts_per_tok"] * 4 * (40 + 8 - 1)
    assert [sum(layer) for layer in found["tokens"]] == [pairs] * len(found["layers"])
    assert found["layers"] == list(range(config["first_k_dense_replace"], config["num_hidden_layers"]))

"""What the environment may ask for, which servers compaction refuses, and the picture of the pool."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang_sm120 import cli
from sglang_sm120.kvdefrag import kv_map, serving
from sglang_sm120.kvdefrag.settings import Settings, When

from tests.cpu.answering import answering
from tests.kvdefrag import schedules
from tools.churn import World


def test_everything_is_off_by_default():
    assert Settings.from_environment({}) == Settings(extent_tokens=0, compact=When.OFF)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"SGLANG_SM120_KV_EXTENT": "many"}, "SGLANG_SM120_KV_EXTENT=many: it must be a whole number from 0"),
        ({"SGLANG_SM120_KV_EXTENT": "0.5"}, "SGLANG_SM120_KV_EXTENT=0.5: it must be a whole number from 0"),
        ({"SGLANG_SM120_KV_EXTENT": "-1"}, "SGLANG_SM120_KV_EXTENT=-1"),
        ({"SGLANG_SM120_KV_COMPACT": "yes"}, "it must be one of off, idle, auto, every-step"),
        ({"SGLANG_SM120_KV_COMPACT_BELOW": "1.5"}, "from 0 to 1: a contiguity"),
        ({"SGLANG_SM120_KV_COMPACT_MS": "0"}, "milliseconds"),
        (
            {"SGLANG_SM120_KV_COMPACT": "idle", "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "rust"},
            "unset SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND or set it to python",
        ),
    ],
)
def test_a_bad_variable_is_named(environment, says):
    with pytest.raises(ValueError) as error:
        Settings.from_environment(environment)
    assert says in str(error.value)


def test_a_bad_variable_ends_the_process_instead_of_the_plugin():
    done = subprocess.run(
        [sys.executable, "-c", "from sglang.srt.plugins import load_plugins; load_plugins(); print('served anyway')"],
        env=os.environ | {"SGLANG_SM120_KV_COMPACT": "sometimes"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "served anyway" not in done.stdout
    assert "SGLANG_SM120_KV_COMPACT=sometimes: it must be one of" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [({flag: True}, f"--{flag.replace('_', '-')}") for flag in serving.HOLDERS_ELSEWHERE]
    + [
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"dcp_size": 2}, "--dcp-size 2"),
        ({"kv_canary": "log"}, "--kv-canary log"),
    ],
)
def test_servers_whose_ids_are_held_elsewhere_are_refused(arguments, flag):
    assert serving.refusal(World(64).scheduler()) is None
    assert serving.refusal(World(64).scheduler(**arguments)).startswith(flag)


def test_flags_that_are_refused_exist_upstream():
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(model_path="none", device="cpu")
    for flag in (*serving.HOLDERS_ELSEWHERE, "disaggregation_mode", "pp_size", "dcp_size", "kv_canary"):
        assert hasattr(arguments, flag), flag


def test_every_buffer_of_a_pool_with_keys_and_values_is_moved():
    assert serving.pool_buffers(SimpleNamespace(k_buffer=[1, 2], v_buffer=[3, 4])) == [1, 2, 3, 4]


@pytest.mark.parametrize("apart", ["use_hnd", "k_scale_buffer", "native_k_scale_buffer"])
def test_a_pool_that_keeps_something_apart_is_refused(apart):
    world = World(64)
    setattr(world.pools[1], apart, [torch.zeros(1)])
    assert "scales apart; that is not moved" in serving.refusal(world.scheduler(world.pools[1:]))


def test_an_unknown_allocator_is_refused():
    refused = World(64).scheduler()
    refused.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: None)
    assert "SimpleNamespace, which is not known" in serving.refusal(refused)


@pytest.mark.parametrize("units", [1, 4095, 4097, 2**24 + 3])
def test_a_picture_of_any_pool_has_evenly_spaced_units_of_it(units):
    """Past 2**24 not every place is a float32."""
    owner = torch.ones(units + 1, dtype=torch.int8)
    owner[0] = owner[units // 2 + 1 :] = 0
    cells = kv_map.owners(owner, 5)
    assert len(cells) == min(units, kv_map.CELLS) and abs(int(cells.sum()) - len(cells) / 2) <= 1


def test_the_picture_shows_the_pool_before_and_after(tmp_path, capsys):
    from PIL import Image

    world = World(240, max_requests=5, max_context=160, seed=2)
    schedules.run(world, 25, lambda _: None)
    maps = [world.owners()]
    while world.compact(60, 240):
        pass
    maps.append(world.owners())
    assert sorted(maps[0]) == sorted(maps[1]) and maps[0] != maps[1]
    state = {"map_before": maps[0], "map_after": maps[1], "passes": 1, "mean_run_length": 2.0, "contiguity": 0.5}
    picture = tmp_path / "new" / "kv.png"
    with answering(json.dumps({"internal_states": [{"sm120_kv": state}]})) as url:
        kv_map.run(argparse.Namespace(url=url, out=picture, api_key="secret"))
    said = capsys.readouterr().out
    assert f"{picture}: the pool before (above) and after" in said and "mean run 2.0 units" in said
    image = Image.open(picture).convert("RGB")
    pixel = kv_map.CELL_PIXELS
    lines = -(-len(maps[0]) // kv_map.CELLS_PER_LINE)
    assert image.height == 3 * kv_map.TITLE_PIXELS + 2 * lines * pixel
    for cells, top in zip(maps, (kv_map.TITLE_PIXELS, 2 * kv_map.TITLE_PIXELS + lines * pixel), strict=True):
        for at, owner in enumerate(cells):
            line, column = divmod(at, kv_map.CELLS_PER_LINE)
            assert image.getpixel((column * pixel, top + line * pixel)) == kv_map.colour(owner)


def test_the_picture_of_a_pool_in_which_nothing_moved_is_drawn_once(tmp_path, capsys):
    from PIL import Image

    state = {"map_before": [0, -1], "map_after": [0, -1], "passes": 0, "mean_run_length": None}
    with answering(json.dumps({"internal_states": [{"sm120_kv": state}]})) as url:
        kv_map.run(argparse.Namespace(url=url, out=tmp_path / "kv.png", api_key=None))
    assert "nothing had to be moved" in capsys.readouterr().out
    assert Image.open(tmp_path / "kv.png").height == 2 * kv_map.TITLE_PIXELS + kv_map.CELL_PIXELS


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({}, "runs without compaction"),
        ({"sm120_kv": {"map_after": [], "refused_because": None}}, "yet"),
        ({"sm120_kv": {"map_after": [], "refused_because": "--pp-size 2"}}, "is off on the server at .*: --pp-size 2"),
    ],
)
def test_no_map_yet_says_what_to_do(state, says, tmp_path):
    with answering(json.dumps({"internal_states": [state]})) as url, pytest.raises(RuntimeError, match=says):
        kv_map.run(argparse.Namespace(url=url, out=tmp_path / "kv.png", api_key=None))


def test_the_command_says_what_went_wrong_in_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["kv-map", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "x")])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("error: no server answers at http://127.0.0.1:9 (")

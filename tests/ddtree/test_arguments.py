"""What `--speculative-algorithm DDTREE` refuses at start, naming the flag, and the widths it resolves."""

from __future__ import annotations

import json
import types
from pathlib import Path

import pair
import pytest

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

BASE = ["--model-path", str(pair.TARGET), "--device", "cpu", "--attention-backend", "sm120_mla"]


def resolve(*flags: str):
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    args = prepare_server_args([*BASE, *flags])
    args.resolve_once()
    return args


def resolved(*flags: str):
    from sglang.srt.arg_groups.overrides import resolving_view

    return resolving_view(resolve(*flags))


@pytest.mark.parametrize("budget, width", [(7, 8), (8, 9), (16, 17), (64, 65)])
def test_the_verify_width_covers_block_and_tree(budget, width):
    args = resolved(*pair.ddtree_flags(budget))
    assert args.speculative_num_draft_tokens == width
    assert args.speculative_dflash_block_size == 8, "the budget must not drag the draft block with it"


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("budget", [7, 33])
def test_whoever_sizes_by_the_verify_width_takes_that_of_the_tree(budget, page_size):
    """Slots reserved for a step, rows of a request, tokens of a target pass; a draft pass keeps to the block."""
    from sglang.srt.mem_cache import allocation_sizing
    from sglang.srt.runtime_context import create_context, max_speculative_num_draft_tokens, use_context
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_utils import resolve_num_tokens_per_req

    args = resolve(*pair.ddtree_flags(budget, 8, "--page-size", str(page_size)))
    width, algorithm = budget + 1, SpeculativeAlgorithm.from_string("DDTREE")
    with use_context(create_context(args, role="scheduler")):
        assert max_speculative_num_draft_tokens() == width
        assert allocation_sizing.get_alloc_len_per_decode() == width
        assert allocation_sizing.get_req_to_token_extra_context_len() >= 2 * width + page_size - 1
        for is_draft, chosen, tokens in ((False, None, width), (False, 20, 20), (True, None, 8), (True, 20, 8)):
            asked = {"phase": "target_verify", "spec_algorithm": algorithm, "is_draft_worker": is_draft}
            assert resolve_num_tokens_per_req(**asked, num_draft_tokens=chosen) == tokens


def test_overlap_scheduling_stays_on():
    assert not resolved(*pair.ddtree_flags(16)).disable_overlap_schedule


REFUSED = [
    ("--attention-backend", "torch_native"),
    ("--decode-attention-backend", "torch_native"),
    ("--prefill-attention-backend", "torch_native"),
    ("--speculative-ddtree-budget", "6"),
    ("--speculative-ddtree-budget", "1024"),
    ("--speculative-ddtree-topk", "0"),
    ("--speculative-ddtree-topk", "129"),
    ("--speculative-dflash-block-size", "1"),
    ("--speculative-num-draft-tokens", "8"),
    ("--speculative-num-steps", "3"),
    ("--speculative-eagle-topk", "4"),
    ("--speculative-draft-attention-backend", "sm120_mla"),
    ("--speculative-draft-attention-backend", "trtllm_mha"),
    ("--speculative-draft-window-size", "7"),
    ("--speculative-draft-sink-size", "4", "--speculative-draft-window-size", "64"),
    ("--speculative-accept-threshold-single", "0.5"),
    ("--speculative-accept-threshold-acc", "0.5"),
    ("--speculative-use-rejection-sampling",),
    ("--enable-two-batch-overlap",),
    ("--enable-pdmux", "--chunked-prefill-size", "-1", "--disable-overlap-schedule"),
    ("--enable-lora",),
    ("--enable-return-routed-experts",),
    ("--enable-return-indexer-topk",),
    ("--kv-canary", "log"),
    ("--enable-watermark",),
    ("--enable-unified-memory",),
    ("--enable-deterministic-inference",),
    ("--enable-hierarchical-cache",),
    ("--enable-hisparse", "--disable-radix-cache"),
    ("--speculative-token-map", "tokens.pt"),
    ("--pp-size", "2"),
    ("--dcp-size", "2"),
    ("--attn-cp-size", "2", "--tp-size", "2"),
    ("--disaggregation-mode", "decode"),
]


@pytest.mark.parametrize("flags", REFUSED, ids=" ".join)
def test_refused_with_the_flag_named(flags):
    with pytest.raises((ValueError, AssertionError), match=flags[0]):
        resolve(*pair.ddtree_flags(16), *flags)


def gpu_drafter(**changes):
    given = {
        "device": "cuda", "page_size": 1, "speculative_draft_attention_backend": None,
        "speculative_draft_window_size": 64, "speculative_dflash_block_size": 8,
    }  # fmt: skip
    return types.SimpleNamespace(**given | changes)


def test_on_a_gpu_a_draft_block_runs_on_a_backend_that_is_not_causal():
    from sglang_sm120.ddtree import algorithm

    args = gpu_drafter()
    algorithm._resolve_draft_backend(args)
    assert args.speculative_draft_attention_backend == "triton"
    with pytest.raises(ValueError, match="trtllm_mha does not run draft blocks of DDTREE: use triton, flashinfer"):
        algorithm._resolve_draft_backend(gpu_drafter(speculative_draft_attention_backend="trtllm_mha"))


def test_flashinfer_is_refused_for_a_window_in_pages_only():
    from sglang_sm120.ddtree import algorithm

    for page_size, backend in ((1, "flashinfer"), (None, "flashinfer"), (64, "triton")):
        algorithm._check_draft_window(gpu_drafter(page_size=page_size, speculative_draft_attention_backend=backend))
    with pytest.raises(ValueError, match="flashinfer does not work with --speculative-draft-window-size 64 and"):
        algorithm._check_draft_window(gpu_drafter(page_size=64, speculative_draft_attention_backend="flashinfer"))


def test_a_missing_drafter_is_named():
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        resolve("--speculative-algorithm", "DDTREE")


DOMINO = {"projector_type": "domino", "gru_hidden_dim": 8, "emb_dim": 8, "shift_label": True}
PARTS = {
    "domino": {"dflash_config": DOMINO | {"pure_draft_prefix_len": 1}},
    "selector": {"dflash_config": {"selector_rank": 4, "selector_top_k": 4}},
    "LiLiCorr": {"architectures": ["LiLiCorrDraftModel"]},
    "embedding": {
        "has_embed_tokens": True,
        "quantization_config": {"quant_algo": "W4A16_NVFP4", "quant_method": "modelopt"},
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "dflash_config": {"sample_from_anchor": False},
    },
}


@pytest.mark.parametrize("changes", PARTS.values(), ids=PARTS)
def test_drafters_that_are_more_than_plain_dflash_are_refused(changes, tmp_path: Path):
    config = json.loads((pair.DRAFTER / "config.json").read_text())
    changes = changes | {"dflash_config": config["dflash_config"] | changes.get("dflash_config", {})}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=f"{tmp_path}: DDTREE takes plain DFlash drafters"):
        resolve(*pair.ddtree_flags(16), "--speculative-draft-model-path", str(tmp_path))


PARAMETERS = {
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 3,
    "watermark": object(),
}


@pytest.mark.parametrize("field", [*PARAMETERS, "return_sampling_mask", "return_hidden_states"])
def test_requests_that_trees_cannot_serve_are_refused(monkeypatch, field):
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang_sm120.ddtree import algorithm

    monkeypatch.setattr(algorithm, "_is_ddtree", lambda: True)
    params = SamplingParams()
    request = types.SimpleNamespace(sampling_params=params, return_sampling_mask=False, return_hidden_states=False)
    assert algorithm._refuse_request(None, request, True) is None
    setattr(params if field in PARAMETERS else request, field, PARAMETERS.get(field, True))
    assert field in algorithm._refuse_request(None, request, True)

"""The pair grown for timing computes what the trained pair computes."""

from __future__ import annotations

import json

import pair
import torch
from transformers import DeepseekV3ForCausalLM

from tools import dflash, grow_pair


def test_grown_pair_gives_the_same_logits(tmp_path):
    grow_pair.grow(tmp_path, growth=2, layers=6, head=32)
    ids = torch.tensor(pair.held_out_prompts(1, seed=9))[:, :64]
    anchors = torch.arange(4, ids.shape[1] - 8)
    logits = []
    for folder in (pair.PAIR, tmp_path):
        target = DeepseekV3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        drafter = dflash.load(folder / "drafter")
        with torch.no_grad():
            drafts = dflash.draft_logits(drafter, target, ids, anchors, dflash.target_features(target, ids)[0])
            logits.append((target(ids).logits, drafts))
    for small, grown in zip(*logits, strict=True):
        # The query scale is no power of two, so bf16 weights round: nothing else differs.
        assert (small - grown).abs().max() < 0.05 * small.std()
        assert (small.argmax(-1) == grown.argmax(-1)).float().mean() > 0.97


def test_text_after_filler_is_text_at_the_start(tmp_path):
    """As long as the pair's window, at any position, however much filler of whichever kind lies before it."""
    grow_pair.grow(tmp_path, growth=2, layers=6, head=32)
    target = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    ids = torch.tensor(pair.held_out_prompts(1, seed=9))[:, :64]
    filler = torch.tensor([[*grow_pair.FILLERS] * 300])
    with torch.no_grad():
        alone, after = target(ids).logits, target(torch.cat([filler, ids], 1), logits_to_keep=64).logits
    assert (alone - after).abs().max() < 1e-3 * alone.std()


def test_a_whole_pair_is_left_and_a_part_of_one_is_grown_again(tmp_path):
    shape = {"growth": 2, "layers": 5, "head": 32}
    grow_pair.grow(tmp_path, **shape)
    weights = tmp_path / "target" / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert grow_pair.grow(tmp_path, **shape) == tmp_path and weights.stat().st_mtime_ns == written
    (tmp_path / "grown.json").unlink()
    grow_pair.grow(tmp_path, **shape)
    assert weights.stat().st_mtime_ns > written
    grow_pair.grow(tmp_path, **shape | {"layers": 6})
    assert json.loads((tmp_path / "target" / "config.json").read_text())["num_hidden_layers"] == 6

"""Draw the draft tree of one step as text: what the trained drafter proposed, and what the target took of it."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from sglang_sm120.ddtree import tree as trees
from torch import Tensor
from transformers import DeepseekV3ForCausalLM, PreTrainedTokenizerFast

from tools import dflash
from tools.dflash import BLOCK_SIZE


def best_step(pair: Path, prompt: list[int], output: list[int], budget: int = 16, topk: int = 8) -> str:
    """The tree with the longest accepted path along `output`, what the target of `pair` wrote after `prompt`."""
    transformers.utils.logging.disable_progress_bar()
    target = DeepseekV3ForCausalLM.from_pretrained(pair / "target", dtype=torch.float32).eval()
    drafter = dflash.load(pair / "drafter")
    ids = torch.tensor([[*prompt, *output]])
    anchors = torch.arange(len(prompt), ids.shape[1] - BLOCK_SIZE)
    with torch.no_grad():
        logits = dflash.draft_logits(drafter, target, ids, anchors, dflash.target_features(target, ids)[0])[0]
    log_probs, candidates = logits.log_softmax(-1).topk(topk)
    tree = trees.build_trees(ids[0, anchors], candidates, log_probs, budget)
    no_slots = torch.zeros_like(tree.tokens)
    choices = following(tree, ids[0], anchors)
    path = trees.walk(tree.tokens, tree.parents, choices, no_slots, anchors, BLOCK_SIZE - 1)
    row = int(path.commit_lens.argmax())
    names = PreTrainedTokenizerFast.from_pretrained(pair / "target").batch_decode(tree.tokens[row][:, None])
    return trees.draw(tree, row, names, set(path.nodes[row, : path.commit_lens[row]].tolist()))


def following(tree: trees.DraftTree, ids: Tensor, anchors: Tensor) -> Tensor:
    """Choices [A, Q] that follow the text `ids`: after a node of depth d, the token d + 1 past the anchor."""
    return ids[anchors[:, None] + tree.depths + 1]

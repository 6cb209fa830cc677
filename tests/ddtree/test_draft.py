"""From hidden states to trees, through upstream's candidates."""

from __future__ import annotations

import types

import pytest
import torch

pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")

REQUESTS, BLOCK, HIDDEN, VOCAB = 2, 4, 8, 50


def test_masses_are_log_probabilities_over_the_whole_vocabulary(monkeypatch):
    """Sums of them decide between depths, and the adaptive width takes them for probabilities."""
    from sglang.srt.models import dflash
    from sglang_sm120.ddtree.draft import TreeDrafter

    monkeypatch.setattr(dflash, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    torch.manual_seed(3)
    lm_head = types.SimpleNamespace(weight=torch.randn(VOCAB + 6, HIDDEN), org_vocab_size=VOCAB, quant_method=None)
    lm_head.weight[VOCAB:] = 9.0  # rows of padding, which are no tokens
    hidden = torch.randn(REQUESTS, BLOCK, HIDDEN)
    drafter = TreeDrafter(lm_head, block_size=BLOCK, topk=5, budget=20)
    tree = drafter.build(hidden.flatten(0, 1), torch.tensor([7, 8]))
    expected = (hidden @ lm_head.weight[:VOCAB].T).log_softmax(-1)  # of position d: what a node of depth d has
    for request in range(REQUESTS):
        assert tree.depths[request].max() > 1
        for node in range(1, tree.width):
            depth, parent = int(tree.depths[request, node]), int(tree.parents[request, node])
            mass = tree.masses[request, parent] + expected[request, depth, tree.tokens[request, node]]
            assert tree.masses[request, node].item() == pytest.approx(mass.item(), abs=1e-4)

"""From hidden states to trees, through upstream's candidates."""

from __future__ import annotations

import concurrent.futures
import threading
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


class AllGather:
    """Upstream's all-gather among threads, one a rank."""

    def __init__(self, ranks: int) -> None:
        self.here, self.parts = threading.local(), [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks, timeout=60)

    def __call__(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        self.parts[self.here.rank] = part
        self.barrier.wait()
        gathered = torch.cat(self.parts, dim)
        self.barrier.wait()
        return gathered


def test_ranks_build_the_tree_of_one_from_global_ids(monkeypatch):
    """Each holds a part of the vocabulary and rows of padding that would win, were they tokens."""
    from sglang.srt.models import dflash
    from sglang_sm120.ddtree.draft import TreeDrafter

    torch.manual_seed(3)
    weight, hidden = torch.randn(VOCAB, HIDDEN), torch.randn(REQUESTS * BLOCK, HIDDEN)
    roots = torch.tensor([7, 8])
    gather = AllGather(2)

    def tree(lm_head: types.SimpleNamespace):
        return TreeDrafter(lm_head, block_size=BLOCK, topk=5, budget=20).build(hidden, roots)

    def tree_of_rank(rank: int, begin: int, end: int):
        gather.here.rank = rank
        padded = torch.cat([weight[begin:end], torch.full((6, HIDDEN), 9.0)])
        share = types.SimpleNamespace(num_org_elements=end - begin, org_vocab_start_index=begin)
        return tree(types.SimpleNamespace(weight=padded, quant_method=None, shard_indices=share))

    monkeypatch.setattr(dflash, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    alone = tree(types.SimpleNamespace(weight=weight, org_vocab_size=VOCAB, quant_method=None))
    monkeypatch.setattr(dflash, "get_parallel", lambda: types.SimpleNamespace(tp_size=2))
    monkeypatch.setattr(dflash, "tensor_model_parallel_all_gather", gather)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(tree_of_rank, (0, 1), (0, 30), (30, VOCAB))
    assert all(map(torch.equal, first.parts(), second.parts()))
    for part in ("tokens", "parents", "depths", "words"):
        assert torch.equal(getattr(first, part), getattr(alone, part)), part
    torch.testing.assert_close(first.masses, alone.masses)
    assert first.tokens[:, 1:].min() < 30 <= first.tokens.max(), "both shares must be in it"


def test_a_replay_leaves_its_trees_where_the_last_one_did(monkeypatch):
    """A graph knows addresses only: trees in new memory would stay those of the capture."""
    from sglang.srt.models import dflash
    from sglang_sm120.ddtree.draft import CapturedDrafter, TreeDrafter

    monkeypatch.setattr(dflash, "get_parallel", lambda: types.SimpleNamespace(tp_size=1))
    torch.manual_seed(3)
    lm_head = types.SimpleNamespace(weight=torch.randn(VOCAB, HIDDEN), org_vocab_size=VOCAB, quant_method=None)
    drafter = TreeDrafter(lm_head, block_size=BLOCK, topk=5, budget=20)
    captured = CapturedDrafter(drafter, REQUESTS + 1, torch.device("cpu"))
    read = captured.trees(REQUESTS)
    for _ in range(2):
        hidden, block_ids = torch.randn(REQUESTS * BLOCK, HIDDEN), torch.randint(VOCAB, (REQUESTS * BLOCK,))
        captured(hidden, block_ids)
        expected = drafter.build(hidden, block_ids[::BLOCK])
        assert all(map(torch.equal, read.parts(), expected.parts()))

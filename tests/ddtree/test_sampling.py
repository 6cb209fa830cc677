"""The walk commits tokens with the target's own distribution: chi-square over 20,000 draws on a tiny vocabulary."""

from __future__ import annotations

import functools
import types

import numpy as np
import pytest
import torch
from scipy.stats import chi2
from sglang_sm120.ddtree import tree as T

VOCAB, DEPTH, DRAWS = 5, 3, 20_000
SIGNIFICANCE = 1e-4


def target_logits() -> torch.Tensor:
    """[V + 1, V, V + 1, V]: logits after each context of up to two tokens; index V is `nothing yet`."""
    generator = torch.Generator().manual_seed(5)
    return 1.5 * torch.randn((VOCAB + 1, VOCAB + 1, VOCAB + 1, VOCAB), generator=generator)


def probabilities(temperature: float) -> torch.Tensor:
    return torch.softmax(target_logits() / temperature, dim=-1)


def context_of(tree: T.DraftTree, node: int) -> list[int]:
    path = []
    while node > 0:
        path.append(int(tree.tokens[0, node]))
        node = int(tree.parents[0, node])
    return (path[::-1] + [VOCAB] * DEPTH)[:DEPTH]


def draft_tree(topk: int, budget: int) -> T.DraftTree:
    """A tree whose marginals have nothing to do with the target."""
    generator = torch.Generator().manual_seed(4)
    log_probs, ids = torch.randn((1, DEPTH, VOCAB), generator=generator).log_softmax(-1).topk(topk)
    return T.build_trees(torch.tensor([0]), ids, log_probs, budget)


def repeat(tree: T.DraftTree) -> T.DraftTree:
    return T.DraftTree(*(part.repeat_interleave(DRAWS, 0) for part in tree.parts()))


def walk(tree: T.DraftTree, choices: torch.Tensor) -> T.Path:
    many = repeat(tree)
    return T.walk(many.tokens, many.parents, choices, torch.zeros_like(many.tokens), torch.zeros(DRAWS), DEPTH)


def sampled_walk(tree: T.DraftTree, probs: torch.Tensor) -> T.Path:
    return walk(tree, torch.multinomial(probs, DRAWS, replacement=True).T.contiguous())


def biased_walk(tree: T.DraftTree, probs: torch.Tensor) -> T.Path:
    """Wrong on purpose: wherever the sample is no child, a second sample gets another chance to be one."""
    choices = torch.multinomial(probs, DRAWS, replacement=True).T.contiguous()
    again = torch.multinomial(probs, DRAWS, replacement=True).T.contiguous()
    child_tokens = torch.zeros((tree.width, VOCAB), dtype=torch.bool)
    for node in range(1, tree.width):
        child_tokens[tree.parents[0, node], tree.tokens[0, node]] = True
    missed = ~child_tokens[torch.arange(tree.width), choices]
    return walk(tree, torch.where(missed, again, choices))


def p_value(path: T.Path, temperature: float) -> float:
    """Chi-square of the first three tokens; those past the committed ones come from the target, as in later steps."""
    probs = probabilities(temperature)
    tokens = path.tokens[:, :DEPTH].clone()
    for depth in range(DEPTH):
        context = torch.full((DRAWS, DEPTH), VOCAB)
        context[:, :depth] = tokens[:, :depth]
        fresh = torch.multinomial(probs[tuple(context.T)], 1)[:, 0]
        tokens[:, depth] = torch.where(depth < path.commit_lens, tokens[:, depth], fresh)
    cells = torch.arange(VOCAB**DEPTH)
    first, second, third = cells // VOCAB**2, cells // VOCAB % VOCAB, cells % VOCAB
    expected = DRAWS * (
        probs[VOCAB, VOCAB, VOCAB, first] * probs[first, VOCAB, VOCAB, second] * probs[first, second, VOCAB, third]
    )
    observed = torch.bincount(tokens[:, 0] * VOCAB**2 + tokens[:, 1] * VOCAB + tokens[:, 2], minlength=VOCAB**DEPTH)
    expected, observed = expected.double().numpy(), observed.double().numpy()
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    observed = np.append(observed[~rare], observed[rare].sum())
    return float(chi2.sf(((observed - expected) ** 2 / expected.clip(1e-9)).sum(), len(expected) - 1))


def node_probabilities(tree: T.DraftTree, temperature: float) -> torch.Tensor:
    probs = probabilities(temperature)
    return torch.stack([probs[tuple(context_of(tree, node))] for node in range(tree.width)])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("topk, budget", [(1, 3), (3, 8), (5, 24)])
def test_sampling_walk_follows_the_target(temperature, topk, budget):
    torch.manual_seed(11)
    tree = draft_tree(topk, budget)
    path = sampled_walk(tree, node_probabilities(tree, temperature))
    assert path.commit_lens.float().mean() > 1.1, "nothing was accepted, so nothing was tested"
    assert p_value(path, temperature) > SIGNIFICANCE


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_a_biased_walk_is_found_out(temperature):
    torch.manual_seed(11)
    tree = draft_tree(topk=3, budget=8)
    assert p_value(biased_walk(tree, node_probabilities(tree, temperature)), temperature) < SIGNIFICANCE


def sampling_of(requests: int, **changes):
    """Upstream's description of a batch that samples at temperature 1 without filters, with these tensors instead."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    given = {
        "temperatures": torch.ones(requests, 1),
        "top_ps": torch.ones(requests),
        "top_ks": torch.full((requests,), VOCAB),
        "min_ps": torch.zeros(requests),
    }
    return SamplingBatchInfo(
        **given | changes,
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling="top_ps" in changes,
        need_top_k_sampling="top_ks" in changes,
        need_min_p_sampling="min_ps" in changes,
        vocab_size=VOCAB,
        device="cpu",
    )


def drawn(logits: torch.Tensor, sampling, width: int) -> torch.Tensor:
    """By the worker's own choice and upstream's sampler."""
    from sglang.srt.layers.sampler import Sampler
    from sglang_sm120.ddtree.verify import choose

    sampler = types.SimpleNamespace(_sample_from_probs=functools.partial(Sampler._sample_from_probs, None))
    return choose(logits, torch.zeros(len(logits)), sampling, sampler, width)


SURE = {
    "temperatures": torch.tensor([[1e-4], [1.0]]),
    "top_ks": torch.tensor([1, VOCAB]),
    "top_ps": torch.tensor([1e-6, 1.0]),
    "min_ps": torch.tensor([1.0, 0.0]),
}


@pytest.mark.parametrize("setting", SURE)
def test_all_nodes_of_a_request_are_drawn_by_its_own_settings(setting, monkeypatch):
    """Two requests: the first one's settings leave the best token alone, the second one's leave all."""
    pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")
    from sglang.srt.layers import sampler

    in_torch = types.SimpleNamespace(kernel=types.SimpleNamespace(sampling_backend="pytorch"))
    monkeypatch.setattr(sampler, "get_exec", lambda: in_torch)
    torch.manual_seed(5)
    width = 200
    logits = torch.randn(2 * width, VOCAB)
    choices = drawn(logits, sampling_of(2, **{setting: SURE[setting]}), width).view(2, width)
    best = logits.argmax(-1).view(2, width)
    assert torch.equal(choices[0], best[0])
    assert (choices[1] != best[1]).sum() > width // 4


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_worker_draws_what_the_walk_needs(temperature):
    """The same test through `verify.choose` and upstream's sampler, from logits, 20,000 requests in one batch."""
    pytest.importorskip("sglang", reason="the patched sglang is not installed here: run `make install`")
    torch.manual_seed(11)
    tree = draft_tree(topk=3, budget=8)
    sampling = sampling_of(DRAWS, temperatures=torch.full((DRAWS, 1), temperature))
    logits = torch.stack([target_logits()[tuple(context_of(tree, node))] for node in range(tree.width)])
    choices = drawn(logits.repeat(DRAWS, 1), sampling, tree.width)
    path = walk(tree, choices.view(DRAWS, tree.width))
    assert p_value(path, temperature) > SIGNIFICANCE

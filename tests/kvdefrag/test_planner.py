"""What a pass plans: decisions one after the other are one permutation, and any permutation is cut into lists."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_sm120.kvdefrag import planner
from sglang_sm120.kvdefrag.compactor import Survey

WINDOW = 24


def random_survey(seed: int, units: int = 300, segments: int = 7) -> Survey:
    """A pool whose units belong to anybody, or to nobody, in any order, but for stretches that lie as they should."""
    random = np.random.default_rng(seed)
    owner = random.integers(0, segments + 1, units)
    if seed % 2:
        owner.sort()
        for _ in range(seed % 9):
            a, b = random.integers(0, units - 30, 2)
            owner[a : a + 30], owner[b : b + 30] = owner[b : b + 30].copy(), owner[a : a + 30].copy()
    owner = torch.from_numpy(np.append(segments, owner))
    held = [1 + torch.from_numpy(random.permutation(np.flatnonzero(owner[1:] == s))) for s in range(segments)]
    position = torch.arange(units + 1)
    for ids in held:
        position[ids] = torch.arange(len(ids))
    free = 1 + (owner[1:] == segments).nonzero().view(-1)
    return Survey(None, [], free, torch.cat(held), [len(ids) for ids in held], owner, position)


def carry_out(chunks: list, content: torch.Tensor) -> torch.Tensor:
    """What the chunks make of the pool, as the move would."""
    content = content.clone()
    for src, dst in chunks:
        content[dst[dst >= 0]] = content[src[src >= 0]]
    return content


def check_lists(chunks: list, new_unit: torch.Tensor, length: int) -> None:
    """The chunks do what `new_unit` says and can be undone; no list of one touches another's places."""
    places = torch.arange(len(new_unit))
    for src, dst in chunks:
        assert src[src >= 0].unique().numel() == (src >= 0).sum() and torch.equal(src < 0, dst < 0)
        for a, b in zip(src.view(-1, src.shape[-1]), dst.view(-1, src.shape[-1]), strict=True):
            assert torch.equal(a.sort().values, b.sort().values), "a list is a permutation of its places"
    after = carry_out(chunks, places)
    assert torch.equal(new_unit[after], places), "what lay at a place lies where the permutation says"
    assert torch.equal(carry_out([(dst, src) for src, dst in reversed(chunks)], after), places)
    lists = chunks[0][0]
    assert lists.shape[1] == length and (lists >= 0).sum() == (new_unit != places).sum()
    assert len(chunks) <= 2 and all(src.numel() <= 2 * len(lists) for src, _ in chunks[1:])


@given(
    seed=st.integers(0, 2**31),
    units=st.integers(2, 200),
    length=st.integers(1, 60),
    cycles=st.sampled_from(["any", "one", "pairs", "few move"]),
)
def test_any_permutation_is_cut_into_lists(seed, units, length, cycles):
    order = torch.randperm(units, generator=torch.Generator().manual_seed(seed))
    new_unit = torch.arange(units)
    if cycles == "any":
        new_unit = order
    elif cycles == "one":
        new_unit[order] = order.roll(1)
    else:
        pairs = order[: (units // 2 if cycles == "pairs" else units // 20) * 2]
        new_unit[pairs] = pairs.view(2, -1).flip(0).reshape(-1)
    if (new_unit != torch.arange(units)).any():
        check_lists(planner.in_lists(new_unit, length), new_unit, length)


def test_pieces_gathered_one_after_the_other_make_one_permutation():
    outcomes = []
    for seed in range(40):
        survey = random_survey(seed)
        order = planner.Order(survey)
        places = np.arange(order.units + 1)
        layout = planner.Layout(order, planner.Plan([], torch.from_numpy(places), 0, 0, 0))
        ends = order.gaps(layout.key[:-1], layout.key[1:])
        one_by_one = places.copy()
        for piece in survey.held.split(17)[:12]:
            piece, at, key = piece.numpy(), layout.at.copy(), layout.key.copy()
            outcomes.append(layout.gather(at[piece], 5 if seed % 3 else planner.UNITS_PER_GAP))
            if outcomes[-1]:
                assert (np.diff(layout.at[piece]) == 1).all(), "the piece is one run, in token order"
                others = np.setdiff1d(layout.unit[layout.key[:-1] != key[:-1]], piece)
                assert (np.diff(order.key.numpy()[others[layout.at[others].argsort()]]) > 0).all(), "others in order"
                one_by_one[layout.at] = one_by_one[at]
            else:
                assert (layout.at == at).all() and (layout.key == key).all()
            assert (layout.at[layout.unit] == places).all() and (one_by_one == layout.unit).all()
            assert (layout.key[:-1] == order.key.numpy()[layout.unit]).all()
            left = order.gaps(layout.key[:-1], layout.key[1:])
            assert ends.sum() - left.sum() == layout.gaps_closed and layout.moved == (layout.unit != places).sum()
            assert (layout._cheap[7 : 7 + len(places)] == (left | (layout.key[:-1] >= order.free))).all()
        new_unit = torch.from_numpy(layout.at)
        chunks = planner.in_lists(new_unit, WINDOW)
        check_lists(chunks, new_unit, WINDOW)
        assert (carry_out(chunks, torch.from_numpy(places)).numpy() == one_by_one).all()
    assert set(outcomes) == {True, False}


def in_any_order(chunks: list, places: list, random: Random) -> None:
    """Carry the chunks out on `places`: in each, every list reads all its units, then writes, some lists ahead."""
    for src, dst in chunks:
        lists = list(zip(src.view(-1, src.shape[-1]).tolist(), dst.view(-1, dst.shape[-1]).tolist(), strict=True))
        steps = [(at, what) for at in range(len(lists)) for what in ("read", "write")]
        staged: dict[int, dict] = {}
        for at, what in random.sample(steps, len(steps)):
            from_, to = lists[at]
            if at not in staged:
                staged[at] = {b: places[a] for a, b in zip(from_, to, strict=True) if b >= 0}
            if what == "write":
                for place, content in staged[at].items():
                    places[place] = content


def test_every_token_gets_to_its_place_in_whatever_order_lists_are_moved():
    random, chunks = Random(0), 0
    for seed in range(80):
        survey = random_survey(seed, units=random.choice([40, 100, 301]), segments=random.choice([1, 4, 9]))
        moves = planner.plan(survey, random.choice([5, WINDOW]), random.choice([WINDOW, 10 * WINDOW, 1000]), 32)
        if moves is None:
            continue
        chunks += len(moves.chunks)
        tokens = list(zip(survey.owner.tolist(), survey.position.tolist(), strict=True))
        places = list(tokens)
        in_any_order(moves.chunks, places, random)
        assert [places[new] for new in moves.new_unit.tolist()] == tokens
        assert places[0] == tokens[0], "the padding is no place"
        in_any_order([(dst, src) for src, dst in reversed(moves.chunks)], places, random)
        assert places == tokens
    assert chunks > 80


@pytest.mark.parametrize("budget", [1, WINDOW, 3 * WINDOW, 10 * WINDOW])
def test_passes_keep_to_the_budget_and_come_to_an_end(budget):
    pieces = 0
    for seed in range(20):
        survey, passes = random_survey(seed), 0
        # A window that pays closes three gaps then, and tears two at most from its neighbours.
        while moves := planner.plan(survey, WINDOW, budget, units_per_gap=WINDOW // 3):
            src, _ = moves.chunks[0]
            assert moves.units_moved <= max(budget, WINDOW if not moves.pieces else 2 * WINDOW)
            assert moves.gaps_closed > 0 and src.shape[1] == WINDOW
            pieces, passes = pieces + moves.pieces, passes + 1
            assert passes < 100
            survey = Survey(
                None, [], moves.new_unit[survey.free], moves.new_unit[survey.held], survey.lengths,
                moves.moved(survey.owner), moves.moved(survey.position),
            )  # fmt: skip
    assert pieces


def test_a_pass_that_closes_too_few_gaps_is_not_worth_it():
    survey = random_survey(0)
    moves = planner.plan(survey, WINDOW, 10 * WINDOW)
    share = moves.gaps_closed * planner.UNITS_PER_GAP / (10 * WINDOW)
    assert share > planner.LEAST_SHARE_OF_BUDGET
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "LEAST_SHARE_OF_BUDGET", share + 0.01)
        assert planner.plan(survey, WINDOW, 10 * WINDOW) is None

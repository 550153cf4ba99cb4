"""The number of drafts that a cycle gets."""

import random
from itertools import pairwise

import pytest

from peagle.engine.draft_length import MIN_CYCLES, DraftLength, candidate_lengths
from peagle.engine.step import CycleTime

FLAT = {1: {1: 5.0, 3: 5.2, 7: 5.6}}
"""Seconds where rows cost next to nothing: one request."""
STEEP = {64: {1: 9.0, 3: 12.0, 7: 21.0}}
"""Where each row costs."""


def chosen_for(length: DraftLength, requests: int) -> int:
    """The drafts of a cycle that is launched."""
    drafts = length.choose(requests)
    length.launched(drafts)
    return drafts


def settled(length: DraftLength, requests: int, rate: float, verifications: int = 8000) -> int:
    """What is chosen once drafts were accepted at a rate."""
    for lot in lots([rate] * 7, verifications):
        length.verified(*drawn(chosen_for(length, requests), lot))
    return length.choose(requests)


def lots(rates: list[float], count: int) -> list[int]:
    """How many drafts in a row are right, so many times, where each has its chance."""
    draw = random.Random(0)
    return [[draw.random() < rate for rate in [*rates, 0]].index(False) for _ in range(count)]


def drawn(drafts: int, right: int) -> tuple[int, int]:
    return drafts, min(drafts, right)


def changes(chosen: list[int]) -> int:
    return sum(one != other for one, other in pairwise(chosen))


def test_lengths():
    assert candidate_lengths(8) == (1, 3, 6, 8)
    assert candidate_lengths(7) == (1, 3, 7)
    assert candidate_lengths(2) == (1, 2)
    assert candidate_lengths(1) == (1,)
    assert candidate_lengths(0) == (0,)


@pytest.mark.parametrize(
    ("costs", "requests", "rate", "expected"),
    [(FLAT, 1, 0.8, 7), (FLAT, 1, 0.02, 1), (STEEP, 64, 0.8, 3), (STEEP, 64, 0.98, 7)],
)
def test_as_many_as_bring_the_most_tokens_a_second(costs, requests, rate, expected):
    assert settled(DraftLength(costs), requests, rate) == expected


def test_it_follows_the_load():
    length = DraftLength(FLAT | STEEP)
    assert settled(length, 1, 0.8) == 7
    assert settled(length, 40, 0.8) == 3
    assert settled(length, 1, 0.8) == 7


def test_it_follows_acceptance_both_ways():
    length = DraftLength(STEEP)
    assert [settled(length, 64, rate) for rate in (0.2, 0.99, 0.2)] == [1, 7, 1]


def test_long_contexts_are_worth_more_drafts():
    """Their keys are read once a cycle, however many rows read them."""
    length = DraftLength(STEEP)
    assert settled(length, 64, 0.8) == 3
    for _ in range(500):
        length.took(CycleTime(64, 3, 112.0))
    assert settled(length, 64, 0.8) == 7


def test_it_does_not_change_its_mind_where_later_drafts_are_worse():
    """One rate for all places would: short cycles would ask for long ones, and the reverse."""
    length = DraftLength({64: {1: 9.0, 3: 12.0, 7: 20.0}})
    rates, chosen = [0.87, 0.80, 0.72, 0.66, 0.60, 0.55, 0.50], []
    rights = iter(lots(rates, 64 * 1500))
    for _ in range(1500):
        chosen.append(chosen_for(length, 64))
        for _ in range(64):
            length.verified(*drawn(chosen[-1], next(rights)))
    assert chosen.count(3) > 1350
    assert changes(chosen) < 12


def test_changes_stand_apart():
    """A shorter cycle's first one is not captured."""
    length, chosen = DraftLength(FLAT | STEEP), []
    for cycle in range(200):
        chosen.append(chosen_for(length, 64 if cycle % 2 else 1))
    places = [i for i, (one, other) in enumerate(pairwise(chosen)) if one != other]
    assert len(places) == changes(chosen) > 2
    assert min(b - a for a, b in pairwise(places)) > MIN_CYCLES

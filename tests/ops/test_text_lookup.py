"""Drafts from a text's own repetitions, against a search by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.drafters.lookup import PRICE
from peagle.ops.acceptance import Path
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import NO_DRAFT, Found
from peagle.ops.lookup import MEMORY, look_up, weigh, write_newest


def by_hand(text: list[int], drafts: int, shortest: int, longest: int) -> tuple[list[int], int]:
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for stop in range(len(text) - 1, length - 1, -1):
            if text[stop - length : stop] == text[-length:]:
                grown = text[:]
                for _ in range(drafts):
                    grown.append(grown[len(grown) - (len(text) - stop)])
                return grown[len(text) :], length
    return [NO_DRAFT] * drafts, 0


texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 9), st.data())
def test_matches_are_those_of_a_search_by_hand(batch: list[list[int]], drafts: int, data):
    shortest = data.draw(st.integers(1, 4))
    longest = data.draw(st.integers(shortest, 8))
    history = torch.full((6, 50), 9, dtype=torch.int32)
    rows = data.draw(st.permutations(range(6)))[: len(batch)]
    for row, text in zip(rows, batch, strict=True):
        history[row, : len(text)] = torch.tensor(text)
    counts = torch.tensor([len(text) for text in batch])
    gains = torch.tensor(data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=9, max_size=9)))
    gains = gains[: longest + 1]
    found = look_up(history, torch.tensor(rows), counts, drafts, shortest, gains)
    expected = [by_hand(text, drafts, shortest, longest) for text in batch]
    assert found.tokens.tolist() == [tokens for tokens, _ in expected]
    assert found.lengths.tolist() == [length for _, length in expected]
    assert found.used.tolist() == [n > 0 and bool(gains[n] > 0) for _, n in expected]


def test_the_newest_tokens_are_added_where_they_belong():
    history = torch.zeros(3, 6, dtype=torch.int32)
    emitted = torch.tensor([[7, 8, 9], [4, 5, 6], [1, 2, 3]])
    computed, pending = torch.tensor([5, 1, 2]), torch.tensor([3, 1, 2])
    state = CycleState.empty(emitted, computed, torch.zeros(3, 3, 1), 9, 3)
    state = state._replace(computed=computed, pending=pending, emitted=emitted)
    write_newest(history, state, torch.tensor([2, 0]))
    assert history.tolist() == [[0, 0, 0, 7, 8, 9], [0] * 6, [0, 1, 2, 0, 0, 0]]


@pytest.mark.parametrize("price", [PRICE, 2.0])
def test_a_match_gains_what_is_above_its_price(price: float):
    gains = torch.zeros(5)
    tokens = torch.tensor([[1, 2, 3]])
    found = Found(tokens, torch.tensor([4]), torch.tensor([True]))
    weigh(gains, found, Path(tokens, torch.tensor([[1, 2, 3, 7]])), price)
    share = 1 - torch.exp(torch.tensor(-1 / MEMORY)).item()
    assert gains.tolist() == pytest.approx([0, 0, 0, 0, share * (3 - price)])


def test_what_was_not_verified_counts_as_far_as_is_known():
    """Two drafts of the drafter were right, so the target's first three choices are known."""
    gains = torch.zeros(5)
    found = Found(torch.tensor([[1, 2, 3, 4]]), torch.tensor([2]), torch.tensor([False]))
    path = Path(torch.tensor([[1, 2, 8, 8]]), torch.tensor([[1, 2, 3, 4, 5]]))
    weigh(gains, found, path, 2.0)
    share = 1 - torch.exp(torch.tensor(-1 / MEMORY)).item()
    assert gains[2].item() == pytest.approx(share * (3 - 2))

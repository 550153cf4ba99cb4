import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.ops.acceptance import accepted_counts
from peagle.ops.draft import NO_DRAFT

tokens = st.integers(0, 2)


@given(st.lists(st.tuples(*[tokens] * 4, *[tokens] * 5), min_size=1, max_size=5))
def test_the_longest_equal_prefix_counts(rows: list[tuple[int, ...]]):
    drafts = torch.tensor([row[:4] for row in rows])
    chosen = torch.tensor([row[4:] for row in rows])
    for row, count in zip(rows, accepted_counts(drafts, chosen).tolist(), strict=True):
        draft, choice = row[:4], row[4:]
        assert draft[:count] == choice[:count]
        assert count == 4 or draft[count] != choice[count]


def test_padding_is_never_accepted():
    """Nor where the target chooses -1: its logits are NaN there."""
    drafts = torch.tensor([[5, 6, NO_DRAFT], [7, NO_DRAFT, NO_DRAFT]])
    chosen = torch.tensor([[5, 6, -1, -1], [7, -1, -1, -1]])
    assert accepted_counts(drafts, chosen).tolist() == [2, 1]


def test_no_drafts_at_all():
    assert accepted_counts(torch.empty(3, 0), torch.ones(3, 1)).tolist() == [0, 0, 0]

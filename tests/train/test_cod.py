import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.train.cod import Elements, depth_shares, reaches, sample_elements
from peagle.train.conversations import Document, PackedRows, pack

documents = st.lists(
    st.builds(
        lambda prompt, response: Document(tuple(range(1, prompt + response + 1)), prompt),
        st.integers(0, 6),
        st.integers(2, 12),
    ),
    min_size=1,
    max_size=6,
)
shares = st.builds(
    depth_shares,
    depths=st.integers(1, 5),
    ratio=st.floats(0.1, 1.0),
    floor=st.sampled_from([0.0, 0.5]),
)


def drawn(rows: PackedRows, kept: list[float], seed: int = 0) -> Elements:
    return sample_elements(rows, kept, torch.Generator().manual_seed(seed))


def chains(elements: Elements, row: int) -> set[tuple[int, int]]:
    """The charged (anchor, depth) pairs of a row."""
    charged = elements.charged[row]
    pairs = zip(elements.anchors[row][charged], elements.depths[row][charged], strict=True)
    return {(int(anchor), int(depth)) for anchor, depth in pairs}


def is_response(rows: PackedRows, row: int, anchor: int, depth: int) -> bool:
    """Whether the token two past the element's position is charged, in the anchor's document."""
    place = anchor + depth + 2
    return (
        place < rows.tokens.shape[1]
        and bool(rows.charged[row, place])
        and bool(rows.documents[row, place] == rows.documents[row, anchor])
    )


@given(documents, shares, st.integers(0, 3))
def test_chains_are_nested_and_stay_within_their_document(documents, shares, seed: int):
    rows = pack(documents, 24)
    elements = drawn(rows, shares, seed)
    for row in range(len(rows)):
        pairs = chains(elements, row)
        for anchor, depth in pairs:
            assert is_response(rows, row, anchor, depth)
            assert depth == 0 or (anchor, depth - 1) in pairs
        count = sum(depth == 0 for _, depth in pairs)
        for depth, share in enumerate(shares):
            assert sum(d == depth for _, d in pairs) <= math.ceil(count * share + 1e-6)


@given(documents, st.integers(1, 5))
def test_whole_shares_keep_every_element_that_can_be_charged(documents, depths: int):
    rows = pack(documents, 24)
    elements = drawn(rows, [1.0] * depths)
    for row in range(len(rows)):
        assert chains(elements, row) == {
            (anchor, depth)
            for anchor in range(24)
            for depth in range(depths)
            if all(is_response(rows, row, anchor, d) for d in range(depth + 1))
        }


@settings(max_examples=30)
@given(documents, shares)
def test_the_number_of_elements_depends_on_no_document(documents, shares):
    """So that a compiled kernel sees one shape."""
    some, other = pack(documents, 24), pack([Document((1, 2, 3), 0)], 24)
    sizes = {drawn(rows, shares).anchors.shape[1] for rows in (some, other)}
    assert len(sizes) == 1


def test_the_first_elements_are_depth_zero_of_every_anchor():
    rows = pack([Document((1, 2, 3, 4, 5), 2), Document((6, 7, 8), 1)], 10)
    elements = drawn(rows, [1.0, 0.5])
    assert elements.anchors[0, :10].tolist() == list(range(10))
    assert elements.depths[0, :10].eq(0).all()
    assert elements.depths[0, 10:].eq(1).all()
    # the last token of a document has no next token to read, so no element stands there
    assert elements.documents[0, :10].tolist() == [0, 0, 0, 0, -1, 1, 1, -1, -1, -1]


def test_reaches_looks_two_tokens_past_the_anchor():
    rows = pack([Document((1, 2, 3, 4, 5), 2)], 6)
    assert reaches(rows, 0)[0].tolist() == [True, True, True, False, False, False]
    assert reaches(rows, 1)[0].tolist() == [True, True, False, False, False, False]
    assert not reaches(rows, 4).any()


def test_shares_are_powers_of_the_ratio_above_the_floor():
    assert depth_shares(4, 0.5, 0.0) == [1.0, 0.5, 0.25, 0.125]
    assert depth_shares(4, 0.5, 0.2) == [1.0, 0.5, 0.25, 0.2]


def test_the_papers_example():
    """n = 16, K = 4, r = 0.7 (paper.md section 2.2): 16 + 10 + 7 + 5 = 38 elements.

    Here every depth rounds up, and the last anchors of a document reach fewer depths.
    """
    rows = pack([Document(tuple(range(1, 19)), 2)], 20)
    counts = [0] * 4
    for _, depth in chains(drawn(rows, depth_shares(4, 0.7, 0.0)), 0):
        counts[depth] += 1
    assert counts[0] == 16
    assert all(count <= most for count, most in zip(counts, (16, 12, 8, 6), strict=True))
    assert 34 <= sum(counts) <= 42


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8])
def test_long_documents_keep_what_the_paper_says(ratio: float):
    rows = pack([Document((1,) * 2002, 2)], 2002)
    pairs = chains(drawn(rows, depth_shares(8, ratio, 0.0)), 0)
    expected = 2000 * (1 - ratio**8) / (1 - ratio)
    assert len(pairs) == pytest.approx(expected, rel=0.01)


def test_other_steps_draw_other_anchors():
    rows = pack([Document((1,) * 40, 2)], 40)
    kept = depth_shares(4, 0.5, 0.0)
    assert chains(drawn(rows, kept, 1), 0) == chains(drawn(rows, kept, 1), 0)
    assert chains(drawn(rows, kept, 1), 0) != chains(drawn(rows, kept, 2), 0)

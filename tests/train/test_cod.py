import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_packed_rows import conversation, conversations, packed

from peagle.train.cod import Chains, Elements, depth_shares, reaches, sample_chains
from peagle.train.packing import Batch, Document, pack

batches = st.lists(conversations, min_size=1, max_size=6).map(packed)
shares = st.builds(
    depth_shares,
    depths=st.integers(1, 5),
    ratio=st.floats(0.1, 1.0),
    floor=st.sampled_from([0.0, 0.5]),
)


def drawn(batch: Batch, kept: list[float], seed: int = 0) -> Chains:
    return sample_chains(batch, kept, torch.Generator().manual_seed(seed))


def listed(elements: Elements) -> list[tuple[int, int]]:
    """The (anchor, depth) pairs, in order."""
    return list(zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True))


def in_loss(chains: Chains) -> set[tuple[int, int]]:
    """All (anchor, depth) pairs in the loss."""
    first = {(anchor, 0) for anchor in chains.anchors.tolist()}
    deeper = listed(chains.deeper())
    assert len(first | set(deeper)) == len(chains.anchors) + len(deeper)
    return first | set(deeper)


def is_response(batch: Batch, anchor: int, depth: int) -> bool:
    """Whether everything from two past the anchor to its prediction is one response."""
    ahead = slice(anchor + 2, anchor + depth + 3)
    same = batch.starts[ahead] == batch.starts[anchor]
    return ahead.stop <= len(batch) and bool(batch.loss_mask[ahead].all() and same.all())


@given(batches, shares, st.integers(0, 3))
def test_chains_are_nested_and_stay_within_their_document(batch: Batch, shares, seed: int):
    pairs = in_loss(drawn(batch, shares, seed))
    for anchor, depth in pairs:
        assert is_response(batch, anchor, depth)
        assert depth == 0 or (anchor, depth - 1) in pairs
    startable = [anchor for anchor in range(len(batch)) if is_response(batch, anchor, 0)]
    for depth, share in enumerate(shares):
        drawn_to = math.ceil(len(startable) * share)
        cut_off = sum(not is_response(batch, anchor, depth) for anchor in startable)
        assert drawn_to - cut_off <= sum(d == depth for _, d in pairs) <= drawn_to


@given(conversations, shares, st.integers(0, 3))
def test_chains_respect_interrupted_responses(document: Document, shares, seed: int):
    """A chain predicts tokens of one response, whatever the document says later."""
    for anchor, depth in in_loss(drawn(packed([document]), shares, seed)):
        (end,) = (last for first, last in document.responses if first <= anchor + 2 < last)
        assert anchor + depth + 2 < end


def test_an_interruption_ends_a_chain_and_another_begins_after_it():
    """Reaches look two tokens past the anchor."""
    batch = packed([conversation([(2, 3), (1, 2)], behind=2), conversation([(1, 2)])])
    assert reaches(batch)[:13].tolist() == [3, 2, 1, 0, 2, 1, 0, 0, 0, 0, 1, 0, 0]
    assert not reaches(batch)[13:].any()


@pytest.mark.parametrize("length", [1, 2])
def test_too_short_to_reach_anything(length: int):
    rows = pack([Document.answered((1,) * length, 0)], length)
    assert not reaches(rows.batch(torch.arange(1))).any()


@given(batches, st.integers(1, 5))
def test_whole_shares_keep_every_element_that_can_be_in_the_loss(batch: Batch, depths: int):
    assert in_loss(drawn(batch, [1.0] * depths)) == {
        (anchor, depth)
        for anchor in range(len(batch))
        for depth in range(depths)
        if is_response(batch, anchor, depth)
    }


@given(batches, shares, st.integers(1, 50))
def test_padding_changes_no_chain(batch: Batch, shares, multiple: int):
    assert in_loss(drawn(batch.padded(multiple), shares)) == in_loss(drawn(batch, shares))


@given(batches, shares)
def test_elements_are_sorted_by_anchor_and_then_depth(batch: Batch, shares):
    """Otherwise what an element sees would not be intervals."""
    chains = drawn(batch, shares)
    assert chains.anchors.tolist() == sorted(chains.anchors.tolist())
    deeper = chains.deeper()
    assert listed(deeper) == sorted(listed(deeper))
    assert deeper.places.tolist() == [anchor + depth + 1 for anchor, depth in listed(deeper)]


@given(batches, shares, st.integers(1, 60))
def test_segments_are_the_deeper_elements_in_order(batch: Batch, shares, limit: int):
    chains = drawn(batch, shares)
    segments = list(map(listed, chains.segments(limit)))
    assert [pair for segment in segments for pair in segment] == listed(chains.deeper())
    for segment in segments:
        assert segment[0][1] == 1, "a chain is cut"
        assert len(segment) < limit + len(shares)


@pytest.mark.parametrize("parts", [1, 2, 4, 7])
def test_segments_fill_whole_steps(parts: int):
    """Padding of all but the last is less than two chains; together they fill one step more."""
    depths, step = 8, 128
    batch = pack([conversation([(100, 3900)])], 4000).batch(torch.arange(1))
    chains = drawn(batch, depth_shares(depths, 0.8, 0.2))
    total = len(chains.deeper())
    segments = list(chains.segments(-(-total // parts), step))
    assert [pair for s in segments for pair in listed(s)] == listed(chains.deeper())
    assert parts <= len(segments) <= parts + 1
    assert all(-len(segment) % step < 2 * depths for segment in segments[:-1])
    assert sum(-(-len(segment) // step) for segment in segments) <= -(-total // step) + 1


def test_no_segment_outgrows_its_limit():
    """Each part may be up to a chain short; the last does not get all of the remainder."""
    depths, limit, step = 8, 512, 128
    batch = pack([conversation([(1, 30_000)])], 30_001).batch(torch.arange(1))
    chains = drawn(batch, depth_shares(depths, 0.8, 0.2))
    segments = list(chains.segments(limit, step))
    assert max(map(len, segments)) <= limit + step
    assert sum(map(len, segments)) == len(chains.deeper())


@given(batches, shares, st.integers(1, 9))
def test_padded_elements_come_last(batch: Batch, shares, multiple: int):
    deeper = drawn(batch, shares).deeper()
    padded = deeper.padded(multiple)
    assert len(padded) == -(-len(deeper) // multiple) * multiple
    assert listed(padded)[: len(deeper)] == listed(deeper)
    assert (padded.anchors.diff() >= 0).all()
    assert padded.depths[len(deeper) :].eq(1).all()


@given(batches, shares, st.sampled_from([1e-6, 0.5, 0.99, 1.0]))
def test_the_weight_is_that_of_all_elements(batch: Batch, shares, decay: float):
    chains = drawn(batch, shares)
    assert chains.loss_weight(decay) == pytest.approx(
        sum(decay**depth for _, depth in in_loss(chains))
    )


def test_shares_are_powers_of_the_ratio_above_the_floor():
    assert depth_shares(4, 0.5, 0.0) == [1.0, 0.5, 0.25, 0.125]
    assert depth_shares(4, 0.5, 0.2) == [1.0, 0.5, 0.25, 0.2]


def answered(length: int, prompt: int) -> Batch:
    return pack([Document.answered((1,) * length, prompt)], length + 2).batch(torch.arange(1))


def test_the_papers_example():
    """n = 16, K = 4, r = 0.7: 16 + 10 + 7 + 5 = 38 elements.

    Here every depth rounds up, and the last anchors of a document reach fewer depths.
    """
    counts = [0] * 4
    for _, depth in in_loss(drawn(answered(18, 2), depth_shares(4, 0.7, 0.0))):
        counts[depth] += 1
    assert counts[0] == 16
    assert all(count <= most for count, most in zip(counts, (16, 12, 8, 6), strict=True))
    assert 34 <= sum(counts) <= 42


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8])
def test_long_documents_keep_what_the_paper_says(ratio: float):
    chains = drawn(answered(2002, 2), depth_shares(8, ratio, 0.0))
    expected = 2000 * (1 - ratio**8) / (1 - ratio)
    assert int(chains.lengths.sum()) == pytest.approx(expected, rel=0.01)


def test_other_steps_draw_other_anchors():
    batch, kept = answered(40, 2), depth_shares(4, 0.5, 0.0)
    assert in_loss(drawn(batch, kept, 1)) == in_loss(drawn(batch, kept, 1))
    assert in_loss(drawn(batch, kept, 1)) != in_loss(drawn(batch, kept, 2))

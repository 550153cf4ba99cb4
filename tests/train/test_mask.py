import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.train import mask
from peagle.train.cod import depth_shares, sample_chains
from peagle.train.mask import Visibility
from peagle.train.packing import Document, pack

CPU = torch.device("cpu")


@st.composite
def batches(draw: st.DrawFn):
    lengths = draw(st.lists(st.integers(3, 9), min_size=1, max_size=4))
    rows = pack(
        [Document.answered((1,) * length, draw(st.integers(0, 2))) for length in lengths], 16
    )
    return rows.batch(torch.arange(len(rows)))


@st.composite
def visibilities(draw: st.DrawFn):
    """The whole context of a batch, and all its deeper elements."""
    batch = draw(batches())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    elements = sample_chains(batch, depth_shares(4, 0.7, 0.0), generator).deeper()
    until = torch.arange(len(elements))
    own = until - elements.depths + 1, until
    visibility = Visibility(len(batch), batch.starts[elements.anchors], elements.anchors, own)
    return batch, elements, visibility


@settings(max_examples=25)
@given(visibilities())
def test_the_closed_form_equals_the_papers_rule(drawn):
    """The paper's rule, pair by pair."""
    batch, elements, visibility = drawn
    seen = tiny.seen_pairs(visibility)
    starts = batch.starts.tolist()
    queries = list(zip(elements.anchors.tolist(), elements.depths.tolist(), strict=True))
    keys = [(anchor, 0) for anchor in range(len(batch))] + queries
    for row, (anchor, depth) in enumerate(queries):
        wanted = [
            starts[a] == starts[anchor]
            and ((d == 0 and a <= anchor) or (a == anchor and d <= depth))
            for a, d in keys
        ]
        assert seen[row].tolist() == wanted


@settings(max_examples=25)
@given(visibilities(), st.integers(1, 5))
def test_blocks_cover_what_is_seen_and_no_more(drawn, size: int):
    """A full block has only visible pairs, a partial one some, every other block none."""
    _, elements, visibility = drawn
    if not len(elements):
        return
    original, mask.BLOCK = mask.BLOCK, size
    try:
        made = visibility.block_mask(CPU)
    finally:
        mask.BLOCK = original
    seen = tiny.seen_pairs(visibility)
    for q in range(-(-visibility.queries // size)):
        rows = seen[q * size : (q + 1) * size]
        whole = set(made.full_kv_indices[0, 0, q, : made.full_kv_num_blocks[0, 0, q]].tolist())
        partly = set(made.kv_indices[0, 0, q, : made.kv_num_blocks[0, 0, q]].tolist())
        assert not whole & partly
        for k in range(-(-visibility.keys // size)):
            block = rows[:, k * size : (k + 1) * size]
            if k in whole:
                assert block.all()
                assert block.shape[1] == size
            elif k not in partly:
                assert not block.any()


def test_a_long_mask_takes_no_room_for_pairs():
    """131,072 tokens: as a matrix of rows this would be 17 GB."""
    length = 1 << 17
    visibility = Visibility(length, torch.zeros(length, dtype=torch.int64), torch.arange(length))
    made = visibility.block_mask(CPU)
    assert made.kv_num_blocks.sum() == length // mask.BLOCK
    assert made.full_kv_num_blocks[0, 0, -1] == length // mask.BLOCK - 1

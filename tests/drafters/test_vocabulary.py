import torch
from hypothesis import given
from hypothesis import strategies as st

from peagle.drafters.vocabulary import membership, most_frequent, offsets


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.data())
def test_the_most_frequent_tokens_and_their_maps(counts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, len(counts)))
    kept = most_frequent(torch.tensor(counts), size)
    assert kept.tolist() == sorted(set(kept.tolist()))
    assert len(kept) == size
    left_out = set(range(len(counts))) - set(kept.tolist())
    assert min(counts[t] for t in kept) >= max((counts[t] for t in left_out), default=0)
    assert torch.equal(torch.arange(size) + offsets(kept), kept)
    assert membership(kept, len(counts)).nonzero().flatten().tolist() == kept.tolist()

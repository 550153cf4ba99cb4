import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from peagle.train.cod import depth_shares, sample_elements
from peagle.train.conversations import PADDING, Document, pack
from peagle.train.mask import MaskedAttention, visible


@st.composite
def elements(draw: st.DrawFn):
    lengths = draw(st.lists(st.integers(3, 9), min_size=1, max_size=4))
    rows = pack([Document((1,) * length, draw(st.integers(0, 2))) for length in lengths], 16)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    return sample_elements(rows, depth_shares(4, 0.7, 0.0), generator)


@settings(max_examples=25)
@given(elements())
def test_the_closed_form_equals_the_papers_rule(elements):
    """paper.md section 2.3, pair by pair; and no row is empty, which attention could not bear."""
    seen = visible(elements, elements)
    batch, count = elements.anchors.shape
    for row in range(batch):
        anchors, depths = elements.anchors[row].tolist(), elements.depths[row].tolist()
        documents = elements.documents[row].tolist()
        for q in range(count):
            if documents[q] == PADDING:
                continue
            wanted = [
                documents[k] == documents[q]
                and (
                    (depths[k] == 0 and anchors[k] <= anchors[q])
                    or (anchors[k] == anchors[q] and depths[k] <= depths[q])
                )
                for k in range(count)
            ]
            assert seen[row, 0, q].tolist() == wanted
    assert seen.any(dim=-1).all()


@settings(max_examples=10)
@given(elements())
def test_attention_follows_the_rule(elements):
    batch, count = elements.anchors.shape
    query = torch.randn(batch, 4, count, 8)
    key, value = torch.randn(2, batch, 2, count, 8).unbind()
    attended = MaskedAttention.build(elements, elements)(query, key, value)
    full = F.scaled_dot_product_attention(
        query,
        key.repeat_interleave(2, dim=1),
        value.repeat_interleave(2, dim=1),
        attn_mask=visible(elements, elements),
    )
    torch.testing.assert_close(attended, full, atol=1e-5, rtol=1e-5)

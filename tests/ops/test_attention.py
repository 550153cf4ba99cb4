import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from peagle.ops.attention import AttentionGroup, causal_bias, paged_attention, write_kv

HEADS, KV_HEADS, SIZE, SLOTS = 4, 2, 8, 64


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The last rows of causal attention over a whole sequence. [rows, heads, head_dim]."""
    seen = torch.ones(len(query), len(key), dtype=torch.bool).tril(len(key) - len(query))
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    attended = F.scaled_dot_product_attention(*parts, attn_mask=seen, enable_gqa=True)
    return attended[0].transpose(0, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 3)), min_size=1, max_size=4))
def test_paged_attention_equals_dense(requests: list[tuple[int, int]]):
    """Requests as (length already cached, new rows), scattered over the cache."""
    torch.manual_seed(0)
    slots = list(torch.randperm(SLOTS).split(16))
    cache = torch.randn(2, SLOTS, KV_HEADS, SIZE)  # what others left behind
    groups, queries, wanted = [], [], []
    for own, (past, new) in zip(slots, requests, strict=False):
        key, value = torch.randn(2, past + new, KV_HEADS, SIZE).unbind()
        write_kv(cache, own[: past + new], key, value)
        query = torch.randn(new, HEADS, SIZE)
        first = sum(len(q) for q in queries)
        context = past + new + 2  # two slots past the request's end, hidden by the bias
        groups.append(
            AttentionGroup(
                rows=torch.arange(first, first + new),
                slots=own[None, :context],
                bias=causal_bias(torch.arange(past, past + new)[None], context, cache.dtype),
            )
        )
        queries.append(query)
        wanted.append(dense(query, key, value))
    attended = paged_attention(torch.cat(queries), cache, groups)
    torch.testing.assert_close(attended, torch.cat(wanted), atol=1e-5, rtol=1e-5)


def test_requests_of_one_group_do_not_see_each_other():
    cache = torch.randn(2, SLOTS, KV_HEADS, SIZE)
    query = torch.randn(2, HEADS, SIZE)
    slots = torch.arange(10).view(2, 5)
    group = AttentionGroup(
        torch.arange(2), slots, causal_bias(torch.tensor([[4], [2]]), 5, cache.dtype)
    )
    both = paged_attention(query, cache, [group])
    for row, length in ((0, 5), (1, 3)):
        own = slots[row, :length]
        alone = dense(query[row : row + 1], cache[0, own], cache[1, own])
        torch.testing.assert_close(both[row : row + 1], alone, atol=1e-5, rtol=1e-5)

"""Attention over a paged KV cache: plain torch, one gather and one product a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class AttentionGroup:
    """Batch rows of requests that bring the same number of query rows each.

    Equal numbers make one rectangular product without padded queries; a prefill chunk is usually
    a group of its own.
    """

    rows: Tensor
    """[requests * queries] index of the group's rows."""
    slots: Tensor
    """[requests, context] cache slot of every position; past a request's end, the null slot."""
    bias: Tensor
    """[requests, 1, queries, context]: 0 where a query may look, -inf elsewhere."""


def write_kv(cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store rows in the cache. cache: [2, slots, kv_heads, head_dim]; key, value: [rows, ...]."""
    cache[0].index_copy_(0, slots, key)
    cache[1].index_copy_(0, slots, value)


def paged_attention(
    query: Tensor, cache: Tensor, groups: Sequence[AttentionGroup], scale: float | None = None
) -> Tensor:
    """Attend every query row to its request's context. query, result: [rows, heads, head_dim].

    scale: as in `attend`.
    """
    if len(groups) == 1:
        return _attend_group(query, cache, groups[0], scale)
    attended = torch.empty_like(query)
    for group in groups:
        attended[group.rows] = _attend_group(query[group.rows], cache, group, scale)
    return attended


def attend(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float | None = None
) -> Tensor:
    """Grouped-query attention over contexts that are already gathered.

    query, result: [rows, heads, head_dim], request after request; key, value: [requests, kv_heads,
    context, head_dim]; bias as in `AttentionGroup`, or None where every query sees all; scale: of
    the scores; None: head_dim ** -0.5.
    """
    rows, heads, head_dim = query.shape
    requests = len(key)
    queries = query.view(requests, rows // requests, heads, head_dim).transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        queries, key, value, attn_mask=bias, scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2).reshape(rows, heads, head_dim)


def _attend_group(
    query: Tensor, cache: Tensor, group: AttentionGroup, scale: float | None
) -> Tensor:
    flat = group.slots.reshape(-1)
    key, value = (
        side.index_select(0, flat).unflatten(0, group.slots.shape).transpose(1, 2) for side in cache
    )
    return attend(query, key, value, group.bias, scale)


def causal_bias(positions: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """0 where context index <= the query's position. positions: [requests, queries]."""
    hidden = torch.arange(context, device=positions.device) > positions[:, None, :, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, float("-inf"))

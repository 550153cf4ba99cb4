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

    rows: Tensor | None
    """[requests * queries] index of the group's rows; None is every row of the batch in order."""
    slots: Tensor | slice
    """[requests, context] cache slot of every position; past a request's end, any slot.

    A slice says that the only request's positions lie in order, so that nothing need be gathered.
    """
    bias: Tensor | None
    """[requests, 1, queries, context]: 0 where a query may look, -inf elsewhere; None sees all."""


def write_kv(cache: Tensor, slots: Tensor, key: Tensor, value: Tensor) -> None:
    """Store rows in the cache. cache: [2, slots, kv_heads, head_dim]; key, value: [rows, ...]."""
    cache[0].index_copy_(0, slots, key)
    cache[1].index_copy_(0, slots, value)


def paged_attention(query: Tensor, cache: Tensor, groups: Sequence[AttentionGroup]) -> Tensor:
    """Attend every query row to its request's context. query, result: [rows, heads, head_dim]."""
    if len(groups) == 1:
        return _attend(query, cache, groups[0])
    attended = torch.empty_like(query)
    for group in groups:
        attended[group.rows] = _attend(query[group.rows], cache, group)
    return attended


def _attend(query: Tensor, cache: Tensor, group: AttentionGroup) -> Tensor:
    rows, heads, head_dim = query.shape
    key, value = _context(cache, group.slots)
    requests = len(key)
    attended = F.scaled_dot_product_attention(
        query.view(requests, rows // requests, heads, head_dim).transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=group.bias,
        enable_gqa=True,
    )
    return attended.transpose(1, 2).reshape(rows, heads, head_dim)


def _context(cache: Tensor, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
    """Keys and values of some requests, each [requests, context, kv_heads, head_dim]."""
    if isinstance(slots, slice):
        return cache[0][None, slots], cache[1][None, slots]
    flat = slots.reshape(-1)
    key, value = (side.index_select(0, flat).unflatten(0, slots.shape) for side in cache)
    return key, value


def causal_bias(positions: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """0 where context index <= the query's position. positions: [requests, queries]."""
    hidden = torch.arange(context, device=positions.device) > positions[:, None, :, None]
    bias = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    return bias.masked_fill_(hidden, float("-inf"))

"""Merged parts of attention equal attention over everything."""

import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from peagle.train.attention import Masked, add_dense, causal, merge
from peagle.train.mask import Visibility

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8


def heads(count: int, rows: int) -> Tensor:
    return torch.randn(1, count, rows, SIZE, dtype=torch.float64, requires_grad=True)


def inputs(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(queries * 100 + keys)
    return heads(HEADS, queries), heads(KV_HEADS, keys), heads(KV_HEADS, keys)


def expected(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, enable_gqa=True)


def assert_same(ours: Tensor, reference: Tensor, leaves: tuple[Tensor, ...]) -> None:
    """Values, and gradients under a random direction."""
    torch.testing.assert_close(ours, reference)
    direction = torch.randn_like(reference)
    found = torch.autograd.grad(ours, leaves, direction)
    wanted = torch.autograd.grad(reference, leaves, direction)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_a_dense_part_joins_a_masked_one(queries: int, dense: int, rest: int):
    """Also the gradient, through the log-sums that weigh the parts."""
    query, key, value = inputs(queries, dense + rest)
    last = torch.randint(0, rest, (queries,))
    visibility = Visibility(rest, torch.zeros(queries, dtype=torch.int64), last)
    masked = Masked(visibility, CPU)(query, key[:, :, dense:], value[:, :, dense:])
    some = torch.zeros(queries, dense, dtype=torch.bool)
    half = queries // 2
    parts = [(slice(half), slice(dense)), (slice(half, queries), slice(dense // 2, dense))]
    parts = [part for part in parts if len(some[part[0]])]
    for part in parts:
        some[part] = True
    rows, columns = zip(*parts, strict=True)
    seen = [(key[:, :, part], value[:, :, part]) for part in columns]
    ours = add_dense(query, masked, rows, seen)
    seen = torch.cat((some, tiny.seen_pairs(visibility)), dim=1)
    assert_same(ours, expected(query, key, value, seen), (query, key, value))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_two_masked_parts_merge(queries: int, one: int, other: int):
    query, key, value = inputs(queries, one + other)
    visibilities = []
    for keys in (one, other):
        first = torch.randint(0, keys, (queries,))
        visibilities.append(Visibility(keys, first, torch.full((queries,), keys - 1)))
    parts = [
        Masked(visibilities[0], CPU)(query, key[:, :, :one], value[:, :, :one]),
        Masked(visibilities[1], CPU)(query, key[:, :, one:], value[:, :, one:]),
    ]
    seen = torch.cat([tiny.seen_pairs(visibility) for visibility in visibilities], dim=1)
    assert_same(merge(*parts), expected(query, key, value, seen), (query, key, value))


def test_causal_is_the_mask_of_one_document():
    query, key, value = inputs(7, 7)
    visibility = Visibility(7, torch.zeros(7, dtype=torch.int64), torch.arange(7))
    masked, _ = Masked(visibility, CPU)(query, key, value)
    assert_same(causal(query, key, value), masked, (query, key, value))

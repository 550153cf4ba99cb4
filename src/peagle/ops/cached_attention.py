"""From a layer's q, k, v product to attended values: QK norm, rotation, cache write, attention."""

import functools
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from peagle.ops.norm import rms_norm
from peagle.ops.rope import apply_rope, rotation_at
from peagle.ops.triton import serve


@functools.cache
def _kernels() -> ModuleType:
    from peagle.ops.triton import cached_attention

    return cached_attention


@dataclass(frozen=True)
class Heads:
    """How a product's columns divide into heads, and what is done to queries and keys."""

    query: int
    key_value: int
    size: int
    rotations: Tensor
    """[positions, 2, size] of `rope_table`."""
    norm_weight: Tensor | None
    """[2 * size]: QK norm of queries and of keys; None where a model has none."""
    eps: float
    window: int | None = None
    """A row sees this many positions, its own included; None: all before it."""
    sinks: Tensor | None = None
    """[query] logits that take a share of every row's attention and give nothing."""


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass over many requests, which every tensor here leaves on the device."""

    slots: Tensor
    """[table rows, positions] cache slot of every position of every request."""
    limits: Tensor
    """[table rows] positions of a request that have a slot; nothing is written past them."""
    requests: Tensor
    """[requests] row in `slots`."""
    starts: Tensor
    """[requests] position of each request's first row."""
    firsts: Tensor
    """[requests] that row's place among the rows."""
    counts: Tensor
    """[requests] number of its rows."""
    most: int
    """No request brings more rows than this."""


def cached_attention(qkv: Tensor, heads: Heads, cache: Tensor, rows: PassRows) -> Tensor:
    """Write the rows' keys and values into the cache, and attend to all a request has so far.

    qkv: [rows, (query + 2 * key_value) * size]; cache: [2, slots, key_value, size]. Returns
    [rows, query * size]; rows that belong to no request hold anything.
    """
    if serve(qkv):
        attended: Tensor = _kernels().cached_attention(qkv, heads, cache, rows)
        return attended
    out = torch.zeros(len(qkv), heads.query * heads.size, dtype=qkv.dtype, device=qkv.device)
    for index, request in enumerate(rows.requests.tolist()):
        first, count = int(rows.firsts[index]), int(rows.counts[index])
        positions = int(rows.starts[index]) + torch.arange(count, device=qkv.device)
        limit, slots = int(rows.limits[request]), rows.slots[request]
        share = qkv[first : first + count]
        out[first : first + count] = _one(share, positions, heads, cache, slots, limit)
    return out


def _one(
    qkv: Tensor, positions: Tensor, heads: Heads, cache: Tensor, slots: Tensor, limit: int
) -> Tensor:
    query, key, value = rotate(qkv, positions, heads)
    before = slots[: int(positions[0])]
    keys, values = (
        torch.cat((side[before], fresh)) for side, fresh in zip(cache, (key, value), strict=True)
    )
    kept = int((positions < limit).sum())
    cache[0, slots[positions[:kept]]] = key[:kept]
    cache[1, slots[positions[:kept]]] = value[:kept]
    return attend_plainly(query, keys, values, positions, heads)


def rotate(qkv: Tensor, positions: Tensor, heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Normed and rotated queries [rows, query, size] and keys, and the values."""
    both = qkv.unflatten(-1, (-1, heads.size))
    query, key, value = both.split((heads.query, heads.key_value, heads.key_value), dim=1)
    if heads.norm_weight is not None:
        of_query, of_key = heads.norm_weight.view(2, -1)
        query, key = rms_norm(query, of_query, heads.eps), rms_norm(key, of_key, heads.eps)
    last = len(heads.rotations) - 1
    rotation = rotation_at(heads.rotations, positions.clamp(max=last))
    rotated = (apply_rope(x, rotation).to(qkv.dtype) for x in (query, key))
    return *rotated, value


def attend_plainly(
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, heads: Heads
) -> Tensor:
    """Softmax attention of one request's rows in float32; key, value: [context, heads, size]."""
    group = heads.query // heads.key_value
    key, value = (side.repeat_interleave(group, dim=1).float() for side in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * heads.size**-0.5
    context = torch.arange(len(key), device=key.device)
    hidden = context > positions[:, None]
    if heads.window is not None:
        hidden |= context <= positions[:, None] - heads.window
    scores = scores.masked_fill(hidden, float("-inf"))
    if heads.sinks is not None:
        sinks = heads.sinks.float()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    shares = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", shares, value).flatten(1).to(query.dtype)


def store(
    qkv: Tensor, heads: Heads, cache: Tensor, positions: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write rows' keys and values into the cache, and give all three back as `rotate` does.

    qkv: as in `cached_attention`, whose place the kernel takes for its results; positions, slots:
    [rows].
    """
    if serve(qkv):
        stored: tuple[Tensor, Tensor, Tensor] = _kernels().store(
            qkv, heads, cache, positions, slots
        )
        return stored
    query, key, value = rotate(qkv, positions, heads)
    cache[0, slots], cache[1, slots] = key, value
    return query, key, value

"""From a layer's q, k, v product to attended values: QK norm, rotation, cache write, attention.

`store` and `attend` follow one another: all keys are in the cache before a row looks at any.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.ops.norm import rms_norm
from peagle.ops.rope import apply_rope, rotation_at
from peagle.ops.triton import hopper, kernels, serve


@dataclass(frozen=True)
class Focus:
    """Which heads a layer has, and how far and how fully their rows look."""

    query: int
    key_value: int
    size: int
    window: int | None = None
    """A row sees this many positions, its own included; None: all before it."""
    sinks: Tensor | None = None
    """[query] logits that take a share of every row's attention and give nothing."""

    @property
    def whole(self) -> bool:
        """Whether rows give all of their attention to all that is before them."""
        return self.window is None and self.sinks is None


@dataclass(frozen=True, kw_only=True)
class Heads(Focus):
    """How a product's columns divide into heads, and what is done to queries and keys."""

    rotations: Tensor
    """[positions, 2, size] of `rope_table`."""
    norm_weight: Tensor | None
    """[2 * size]: QK norm of queries and of keys; None where a model has none."""
    eps: float


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass over many requests, which every tensor here leaves on the device."""

    slots: Tensor
    """[table rows, positions] cache slot of every position of every request."""
    limits: Tensor
    """[table rows] positions of a request that have a slot; what lies behind them is not read."""
    requests: Tensor
    """[requests] row in `slots`."""
    starts: Tensor
    """[requests] position of each request's first row."""
    firsts: Tensor
    """[requests] that row's place among the rows."""
    counts: Tensor
    """[requests] number of its rows."""
    positions: Tensor
    """[rows]"""
    writes: Tensor
    """[rows] cache slot of each row; -1: the row's keys are kept nowhere."""
    most: int
    """No request brings more rows than this."""
    shares: Tensor | None = None
    """How a kernel divides the contexts among its programs; None: not told yet."""


def covered(size: int) -> bool:
    """Whether kernels attend with heads of that size."""
    return size >= 16 and size & (size - 1) == 0


def divided(rows: PassRows, heads: Heads, cache: Tensor) -> PassRows:
    """The same rows, told how to divide their contexts where a kernel wants that once a pass.

    heads, cache: of any layer of the pass.
    """
    if hopper(cache) and kernels("hopper_attention").takes(heads, cache, rows):
        return replace(rows, shares=kernels("hopper_attention").shares_of(rows, heads))
    return rows


def store(
    qkv: Tensor, heads: Heads, cache: Tensor, positions: Tensor, writes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate rows, and write their keys and values into the cache.

    qkv: [rows, (query + 2 * key_value) * size], whose place a kernel may take for its results;
    cache: [2, slots, key_value, size]; positions, writes: as in `PassRows`. Returns queries, keys
    and values, each [rows, heads, size].
    """
    if serve(qkv):
        stored: tuple[Tensor, Tensor, Tensor] = kernels("cached_attention").store(
            qkv, heads, cache, positions, writes
        )
        return stored
    query, key, value = rotate(qkv, positions, heads)
    kept = writes >= 0
    cache[0, writes[kept]], cache[1, writes[kept]] = key[kept], value[kept]
    return query, key, value


def attend(query: Tensor, heads: Focus, cache: Tensor, rows: PassRows) -> Tensor:
    """Each row's attention to all that its request has in the cache up to its own position.

    query: [rows, heads, size], with any row stride. Returns [rows, heads * size]; rows that belong
    to no request or have no slot hold anything.
    """
    if serve(query):
        attended: Tensor = kernels("cached_attention").attend(query, heads, cache, rows)
        return attended
    out = query.new_zeros(len(query), heads.query * heads.size)
    columns = (rows.requests, rows.starts, rows.firsts, rows.counts)
    for request, start, first, count in zip(*(c.tolist() for c in columns), strict=True):
        context = rows.slots[request, : min(start + count, int(rows.limits[request]))]
        positions = torch.arange(start, start + len(context[start:]), device=query.device)
        seen = query[first : first + len(positions)]
        out[first : first + len(positions)] = attend_plainly(
            seen, cache[0, context], cache[1, context], positions, heads
        )
    return out


def attend_product(
    qkv: Tensor, heads: Heads, cache: Tensor, rows: PassRows, settled: bool = False
) -> Tensor:
    """`store`, then `attend`, of a pass's rows. qkv as in `store`; returns as `attend`.

    Each request comes once, its rows one position after another, each written where `slots` says.
    settled: `rows` and older positions' keys were complete before a launch that waited for all
    before it, and behind which this one comes: a kernel may read them before its own wait.
    """
    if serve(qkv):
        on_hopper = hopper(qkv) and kernels("hopper_attention").takes(heads, cache, rows)
        name = "hopper_attention" if on_hopper else "product_attention"
        attended: Tensor = kernels(name).attend_product(qkv, heads, cache, rows, settled)
        return attended
    return store_attend(qkv, heads, cache, rows)


def store_attend(qkv: Tensor, heads: Heads, cache: Tensor, rows: PassRows) -> Tensor:
    """The same, apart: a request's rows may come in several pieces, as if each were a request's."""
    query, _, _ = store(qkv, heads, cache, rows.positions, rows.writes)
    return attend(query, heads, cache, rows)


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
    query: Tensor, key: Tensor, value: Tensor, positions: Tensor, heads: Focus
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

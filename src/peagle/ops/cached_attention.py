"""From a layer's q, k, v product to attended values: norms, rotation, cache write, attention.

`store` comes before `attend`: all keys are in the cache before a row looks at any.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.ops.kv_dtype import gathered, stored, widened
from peagle.ops.norm import normalized, rms_norm
from peagle.ops.rope import apply_rope, rotation_at
from peagle.ops.triton import Kernels
from peagle.ops.triton.fences import fence, fences

PAGED = Kernels("cached_attention")
AT_ONCE = Kernels(
    "hopper_attention",
    lambda fast, x, spec, cache, rows: (
        not spec.batch_invariant
        and x.is_contiguous()
        and x.dtype in (cache.dtype, torch.bfloat16)  # E4M3 is widened to bfloat16 alone
        and fast.takes(spec, cache, rows)
    ),
    hopper=True,
)
"""`store` and `attend` in one launch."""
FIXED_ROWS = 16
"""Rows of a request in a pass for which a program has room where results must not depend on their
number: no request brings more then."""


class QKV(NamedTuple):
    """What a layer's rows attend with."""

    query: Tensor
    """[rows, heads, head_dim]"""
    key: Tensor
    """[rows, kv_heads, head_dim]"""
    value: Tensor
    """Like `key`."""


@dataclass(frozen=True)
class AttentionHeads:
    """A layer's attention heads, and which positions they see."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    """Positions that a row sees, its own included; None: all up to its own."""
    sinks: Tensor | None = None
    """[num_heads] logits that take a share of every row's softmax and add no value."""
    scale: float | None = None
    """What scores are multiplied by; None: head_dim ** -0.5."""
    batch_invariant: bool = False
    """On a GPU, whether a row's result must not depend on what other rows there are."""
    causal: bool = True
    """Whether a row sees none of its request's rows behind it; else it sees all in the pass."""
    kv_scales: tuple[float, float] = (1.0, 1.0)
    """The units in which a cache of a narrower type keeps keys and values (`ops.kv_dtype`)."""

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Number of heads, of key-value heads, and head_dim."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def full(self) -> bool:
        """Whether this is plain causal attention, without a window or sinks."""
        return self.window is None and self.sinks is None and self.causal


@dataclass(frozen=True, kw_only=True)
class QKVSpec(AttentionHeads):
    """How to read a layer's q, k, v product: its heads, and the norm and rotation they get."""

    rotations: Tensor
    """[positions, 2, width] of `rope_table`."""
    norm_weight: Tensor | None
    """[2 * head_dim]: QK norm of queries and of keys; None where a model has none."""
    eps: float
    v_norm: bool = False
    """Whether values are normed as well, without a weight."""
    query_scales: Tensor | None = None
    """[positions] of `rope.query_scales`, where there is no QK norm."""


@dataclass(frozen=True)
class PassRows:
    """The rows of one pass over many requests, which every tensor here leaves on the device."""

    slots: Tensor
    """[table rows, positions] cache slot of every position of every request."""
    limits: Tensor
    """[table rows] positions of a request that have a slot; nothing after them is read."""
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
    placed: Tensor
    """[rows] cache slot of each row by the slots of whole contexts; -1: the row's keys are kept
    nowhere."""
    most: int
    """No request brings more rows than this."""
    ancestors: Tensor | None = None
    """[rows] int32, of a tree (`ops.tree`) that no window cuts: bit j is set where a row sees row j
    of its request's; None: all before it, and itself."""
    shares: Tensor | None = None
    """How a kernel divides the contexts among its programs; None: not divided yet."""
    moved: bool = False
    """Whether `slots` are those of layers with a window, and not of whole contexts."""

    def through(self, slots: Tensor) -> "PassRows":
        """The same rows for layers that go by other slots, [table rows, positions]."""
        return replace(self, slots=slots, moved=True)

    @cached_property
    def writes(self) -> Tensor:
        """[rows] as `placed`, by `slots`: found when asked for, since it takes a dozen launches and
        a kernel that stores and attends at once does without it."""
        if not self.moved:
            return self.placed
        rows = torch.arange(len(self.positions), device=self.slots.device)
        owners, kept = torch.searchsorted(self.firsts, rows, right=True) - 1, self.placed >= 0
        places = self.starts[owners] + rows - self.firsts[owners]
        # drafts reach beyond the longest context, where nothing has a place
        return self.slots[self.requests[owners], places.where(kept, 0)].where(kept, -1)


def supports_head_dim(head_dim: int) -> bool:
    """Whether the kernels attend over heads of this size: powers of two from 16 on."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def divided(rows: PassRows, spec: QKVSpec, cache: Tensor) -> PassRows:
    """The same rows with their contexts divided among programs, where a kernel wants that done once
    a pass. spec, cache: any layer's.
    """
    fast = AT_ONCE.chosen(cache, spec, cache, rows)
    return rows if fast is None else replace(rows, shares=fast.shares_of(rows, spec, cache))


def store(
    qkv: Tensor, spec: QKVSpec, cache: Tensor, positions: Tensor, writes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Norm and rotate rows, and write their keys and values into the cache.

    qkv: [rows, (heads + 2 * kv_heads) * head_dim], with any row stride, which a kernel may
    overwrite with its results; cache: [2, slots, kv_heads, head_dim]; positions, writes: as in
    `PassRows`. Returns queries, and keys and values as they are read from the cache, each
    [rows, heads, head_dim].
    """
    if fast := PAGED.chosen(qkv):
        scale_queries(qkv, spec, positions)
        return fast.store(qkv, spec, cache, positions, writes)
    query, *sides = rotate(qkv, positions, spec)
    key, value = write(cache, writes, (sides[0], sides[1]), spec)
    return query, key, value


def write(
    cache: Tensor, writes: Tensor, sides: tuple[Tensor, Tensor], spec: AttentionHeads
) -> tuple[Tensor, Tensor]:
    """Write rows' keys and values, [rows, kv_heads, head_dim], into the cache where `writes` says;
    returns them as they are read from there."""
    kept, read = writes >= 0, []
    for side, own, scale in zip(sides, cache, spec.kv_scales, strict=True):
        rounded = stored(side, cache.dtype, scale)
        own[writes[kept]] = rounded[kept]
        read.append(widened(rounded, side.dtype, scale))
    return read[0], read[1]


@PAGED.op
def attend(query: Tensor, spec: AttentionHeads, cache: Tensor, rows: PassRows) -> Tensor:
    """Each row's attention to all that its request has in the cache up to its own position.

    query: [rows, heads, head_dim], with any row stride. Returns [rows, heads * head_dim], undefined
    for rows that belong to no request or have no slot.
    """
    out = query.new_zeros(len(query), spec.num_heads * spec.head_dim)
    columns = (rows.requests, rows.starts, rows.firsts, rows.counts)
    for request, start, first, count in zip(*(c.tolist() for c in columns), strict=True):
        context = rows.slots[request, : min(start + count, int(rows.limits[request]))]
        own = slice(first, first + len(context[start:]))
        positions = torch.arange(own.start, own.stop, device=query.device) + (start - first)
        key, value = gathered(cache, context, query.dtype, spec.kv_scales)
        hidden = None if spec.causal else positions.new_zeros(1, 1, dtype=torch.bool)
        if rows.ancestors is not None:
            positions = rows.positions[own]
            hidden = tree_mask(rows.ancestors[own], len(context))
        out[own] = attend_reference(query[own], key, value, positions, spec, hidden)
    return out


def tree_mask(ancestors: Tensor, context: int) -> Tensor:
    """[rows, context] what the rows of one request's tree do not see of it.

    ancestors: [rows], as of `PassRows`.
    """
    bits = torch.arange(len(ancestors), device=ancestors.device)
    own = (ancestors[:, None] >> bits) & 1 == 0
    return torch.cat((own.new_zeros(len(own), context - len(own)), own), dim=1)


def attend_product(
    qkv: Tensor, spec: QKVSpec, cache: Tensor, rows: PassRows, since: int | None = None
) -> Tensor:
    """`store`, then `attend`, of a pass's rows. qkv as in `store`; returns as `attend`.

    Each request comes once, its rows at consecutive positions or a tree, each written where `slots`
    says.
    since: how many fences there were when `rows` and all older keys had been launched to be
    written, so that a kernel reads them early once there are more; None: it does not.
    """
    fast = AT_ONCE.chosen(qkv, spec, cache, rows)
    if fast is None:
        return store_attend(qkv, spec, cache, rows)
    scale_queries(qkv, spec, rows.positions)
    settled = since is not None and fences() > since
    attended: Tensor = fast.attend_product(qkv, spec, cache, rows, settled)
    fence()  # it announces after its wait
    return attended


def store_attend(qkv: Tensor, spec: QKVSpec, cache: Tensor, rows: PassRows) -> Tensor:
    """The same in two steps, so that a request's rows may come in pieces, each like a request's."""
    query, _, _ = store(qkv, spec, cache, rows.positions, rows.writes)
    return attend(query, spec, cache, rows)


def scale_queries(qkv: Tensor, spec: QKVSpec, positions: Tensor) -> None:
    """Multiply a product's queries, in place, by what they grow by at their positions."""
    if spec.query_scales is not None:
        last = len(spec.query_scales) - 1
        scales = spec.query_scales.index_select(0, positions.clamp(max=last))
        qkv[:, : spec.num_heads * spec.head_dim].mul_(scales[:, None])


def rotate(qkv: Tensor, positions: Tensor, spec: QKVSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [rows, heads, head_dim] and keys, normed and rotated, and values, perhaps normed."""
    if spec.query_scales is not None:
        qkv = qkv.clone()
        scale_queries(qkv, spec, positions)
    both = qkv.unflatten(-1, (-1, spec.head_dim))
    query, key, value = both.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    if spec.norm_weight is not None:
        of_query, of_key = spec.norm_weight.view(2, -1)
        query, key = rms_norm(query, of_query, spec.eps), rms_norm(key, of_key, spec.eps)
    if spec.v_norm:
        value = normalized(value, spec.eps)
    rotation = rotation_at(spec.rotations, positions.clamp(max=len(spec.rotations) - 1))
    rotated = (apply_rope(x, rotation).to(qkv.dtype) for x in (query, key))
    return *rotated, value


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    spec: AttentionHeads,
    unseen: Tensor | None = None,
) -> Tensor:
    """Softmax attention of one request's rows, in float32.

    key, value: [context, kv_heads, head_dim]; unseen: [rows, context] what rows do not see, windows
    apart; None: what comes after them. Returns [rows, heads * head_dim].
    """
    group = spec.num_heads // spec.num_kv_heads
    key, value = (side.repeat_interleave(group, dim=1).float() for side in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.float(), key) * spec.softmax_scale
    context = torch.arange(len(key), device=key.device)
    hidden = context > positions[:, None] if unseen is None else unseen
    if spec.window is not None:
        hidden = hidden | (context <= positions[:, None] - spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if spec.sinks is not None:
        sinks = spec.sinks.float()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    shares = scores.softmax(dim=-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", shares, value).flatten(1).to(query.dtype)

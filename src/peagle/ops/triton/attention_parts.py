"""What kernels of decoding's attention are made of: rotated heads, tiles of keys, merged parts.

Programs that each had a part of a context leave [parts, rows, head_dim] of what their keys gave,
then [parts, 2, rows] of the highest score and the sum of shares; the last one to come merges them.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.cached_attention import PassRows

LOG2E = tl.constexpr(1.4426950408889634)
"""What turns scores into exponents of two, which GPUs compute."""


class Contexts(NamedTuple):
    """The requests whose rows a pass has, and what the rows see; as in `PassRows`."""

    slots: Tensor
    limits: Tensor
    requests: Tensor
    starts: Tensor
    firsts: Tensor
    counts: Tensor
    positions: Tensor
    ancestors: Tensor
    """As in `PassRows`; anything where rows are no tree's."""

    @classmethod
    def of(cls, rows: PassRows) -> "Contexts":
        """The contexts of a pass."""
        spans = rows.requests, rows.starts, rows.firsts, rows.counts
        ancestors = rows.counts if rows.ancestors is None else rows.ancestors
        return cls(rows.slots, rows.limits, *spans, rows.positions, ancestors)


@triton.jit
def turns(
    rotations, positions, weight, SIZE: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr
):
    """The rotation at some positions, [rows, 1], times the norm's weight: factors of lanes, and
    factors of the lanes that they are paired with.

    WIDTH: how many of a head's lanes turn.
    """
    lane = tl.arange(0, SIZE)[None, :]
    turn = rotations + positions * 2 * WIDTH
    if WIDTH == SIZE:
        own, crossed = tl.load(turn + lane), tl.load(turn + WIDTH + lane)
    else:
        # lanes that do not turn stay as they are
        own = tl.load(turn + lane, mask=lane < WIDTH, other=1.0)
        crossed = tl.load(turn + WIDTH + lane, mask=lane < WIDTH, other=0.0)
    if NORM:
        own = own * tl.load(weight + lane).to(tl.float32)
        crossed = crossed * tl.load(weight + (lane + WIDTH // 2) % WIDTH).to(tl.float32)
    return own, crossed


@triton.jit
def normed_rotated(
    at, mask, own, crossed, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr
):
    """Rows of heads in float32, normed and rotated. own, crossed, WIDTH: of `turns`."""
    lane = tl.arange(0, SIZE)[None, :]
    x = tl.load(at + lane, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(at + (lane + WIDTH // 2) % WIDTH, mask=mask, other=0.0).to(tl.float32)
    # one over the rms is a number per row, so the rotation may come before it
    rotated = x * own + y * crossed
    if NORM:
        rotated = rotated * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
    return rotated


@triton.jit
def normed_values(v, eps, SIZE: tl.constexpr):
    """Rows of values normed without a weight, in their own type."""
    x = v.to(tl.float32)
    return (x * tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]).to(v.dtype)


@triton.jit
def e4m3_of(x):
    """The nearest numbers that e4m3 has, in float32 like x. (The interpreter rounds wrongly.)"""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = x.to(tl.int32, bitcast=True)
    # of float32's 23 bits of mantissa three stay; a bit less than half a step is added, and one
    # more where the last bit that stays is set: a tie goes to the even number
    normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    small = (x + 24576.0) - 24576.0  # whose distance to the next is what e4m3 has below 2 ** -6
    return tl.where(tl.abs(x) < 0.015625, small, normal.to(tl.float32, bitcast=True))


@triton.jit
def kept_of(x, scale, kept: tl.constexpr):
    """What a cache of type `kept` has of numbers in float32, in units of a scale, in float32."""
    x = x / scale
    return e4m3_of(x) if kept == tl.float8e4nv else x.to(kept).to(tl.float32)


@triton.jit
def keys_at(
    cache, slots_at, known, lanes, side_stride, scales, kind: tl.constexpr, WIDTH: tl.constexpr
):
    """Keys and values of some positions, in type `kind`. slots_at: where their slots stand; lanes:
    [1, head_dim] those of a head among all `WIDTH` of a slot."""
    slot = tl.load(slots_at, mask=known, other=0).to(tl.int64)
    at = (slot * WIDTH)[:, None] + lanes
    k = tl.load(cache + at, mask=known[:, None], other=0.0)
    v = tl.load(cache + side_stride + at, mask=known[:, None], other=0.0)
    if cache.dtype.element_ty != kind:
        k_scale, v_scale = scales
        k, v = (k.to(tl.float32) * k_scale).to(kind), (v.to(tl.float32) * v_scale).to(kind)
    return k, v


@triton.jit
def weighed(q, k, v, seen, scale, top, total, attended):
    """The highest score, the sum of shares and what they draw, with one more tile of keys.

    scale: what scores are multiplied by to be exponents of two. The highest score is rounded up to
    a whole number: shares then differ by whole powers of two from one way of cutting keys into
    tiles and parts to another, and bfloat16 rounds them alike.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
    # of a row that has seen nothing yet minus infinity less itself would be NaN
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp2(scores - safe[:, None])
    fade = tl.exp2(top - safe)
    attended = tl.dot(shares.to(v.dtype), v, attended * fade[:, None], input_precision="ieee")
    return higher, total * fade + tl.sum(shares, 1), attended


@triton.jit
def arrived(top, total, attended, base, part, arrivals, active, PARTS: tl.constexpr):
    """Leave a part; returns whether all `active` parts are there. The last sets the count to
    zero."""
    rows: tl.constexpr = attended.shape[0]
    size: tl.constexpr = attended.shape[1]
    index, lane = tl.arange(0, rows), tl.arange(0, size)[None, :]
    tl.store(base + ((part * rows + index) * size)[:, None] + lane, attended)
    sums = base + PARTS * rows * size + part * 2 * rows + index
    tl.store(sums, top)
    tl.store(sums + rows, total)
    # all threads have left their numbers before the part counts
    tl.debug_barrier()
    last = tl.atomic_add(arrivals, 1, sem="acq_rel") == active - 1
    if last:
        tl.store(arrivals, 0)
    return last


@triton.jit
def merged(base, active, PARTS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """All parts as one: the highest score, the sum of shares, and what they draw."""
    index = tl.arange(0, ROWS)
    values = base + (index * SIZE)[:, None] + tl.arange(0, SIZE)[None, :]
    sums = base + PARTS * ROWS * SIZE + index
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, SIZE], tl.float32)
    for part in tl.static_range(PARTS):
        there = (index >= 0) & (part < active)
        at = sums + part * 2 * ROWS
        # past L1, which does not see what other multiprocessors write
        level = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(at + ROWS, mask=there, other=0.0, cache_modifier=".cg")
        value = tl.load(
            values + part * ROWS * SIZE, mask=there[:, None], other=0.0, cache_modifier=".cg"
        )
        higher = tl.maximum(top, level)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        fade, weight = tl.exp2(top - safe), tl.exp2(level - safe)
        total = total * fade + mass * weight
        attended = attended * fade[:, None] + value * weight[:, None]
        top = higher
    return top, total, attended


@triton.jit
def write(top, total, attended, sinks, head, at, real, HEADS: tl.constexpr):
    """Write what rows attended to, less what their heads' sinks take. at: [rows, head_dim]."""
    if sinks is not None:
        # a sink is one more score, of a key without a value
        sink = tl.load(sinks + tl.minimum(head, HEADS - 1)).to(tl.float32) * LOG2E
        total += tl.exp2(sink - top)
    result = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(at, result.to(at.dtype.element_ty), mask=real)

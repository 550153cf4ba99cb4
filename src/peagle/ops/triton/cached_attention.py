"""Attention of decoding in one launch: QK norm, rotation, KV write, split KV and its merge.

A program takes one request, one key-value head and a part of the context; all query heads of the
group and all rows of the request share its keys. The part that comes last in the context also takes
the rows' own keys, straight from the product. Whichever program of a request and head is the last
to finish merges the parts.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.cached_attention import Heads, PassRows

KEYS = 64
"""Context positions a step."""
PROGRAMS = 264
"""Two on each of an H200's multiprocessors."""


def cached_attention(qkv: Tensor, heads: Heads, cache: Tensor, rows: PassRows) -> Tensor:
    """As the reference."""
    requests, group = len(rows.requests), heads.query // heads.key_value
    queries = max(triton.next_power_of_2(rows.most), triton.cdiv(16, group))
    fresh = max(16, triton.next_power_of_2(rows.most))
    splits = _splits(requests * heads.key_value, rows.slots.shape[1])
    out = qkv.new_empty(len(qkv), heads.query * heads.size)
    parts = requests * heads.key_value * splits * queries * group
    partial = torch.empty(parts, heads.size + 2, dtype=torch.float32, device=qkv.device)
    norm = heads.norm_weight
    _attend[(requests, heads.key_value, splits)](
        qkv,
        cache,
        rows.slots,
        rows.limits,
        rows.requests,
        rows.starts,
        rows.firsts,
        rows.counts,
        heads.rotations,
        qkv if norm is None else norm,
        qkv if heads.sinks is None else heads.sinks,
        out,
        partial,
        _arrivals(qkv.device, requests * heads.key_value),
        cache.stride(0),
        rows.slots.stride(0),
        len(heads.rotations),
        heads.eps,
        heads.size**-0.5,
        0 if heads.window is None else heads.window,
        HEADS=heads.query,
        KV_HEADS=heads.key_value,
        SIZE=heads.size,
        GROUP=group,
        QUERIES=queries,
        FRESH=fresh,
        KEYS=KEYS,
        SPLITS=splits,
        NORM=norm is not None,
        WINDOW=heads.window is not None,
        SINKS=heads.sinks is not None,
        num_warps=8 if queries * group > 64 else 4,
        num_stages=2,
    )
    return out


def _splits(programs: int, context: int) -> int:
    """Parts of a context, a power of two, so that there is work for every multiprocessor."""
    wanted = min(PROGRAMS // programs, triton.cdiv(context, KEYS), 32)
    return 1 << max(wanted.bit_length() - 1, 0)


@functools.cache
def _arrivals(device: torch.device, count: int) -> Tensor:
    """Counters that every launch leaves at zero."""
    return torch.zeros(count, dtype=torch.int32, device=device)


@triton.jit
def _normed_rotated(
    source, offsets, mask, weight, rotations, positions, eps, SIZE: tl.constexpr, NORM: tl.constexpr
):
    """Rows of heads, normed and rotated, in float32. offsets, mask: [rows, 1]."""
    lane = tl.arange(0, SIZE)[None, :]
    other = (lane + SIZE // 2) % SIZE
    x = tl.load(source + offsets + lane, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(source + offsets + other, mask=mask, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x = x * factor * tl.load(weight + lane).to(tl.float32)
        y = y * factor * tl.load(weight + other).to(tl.float32)
    turn = rotations + positions * 2 * SIZE
    return x * tl.load(turn + lane) + y * tl.load(turn + SIZE + lane)


@triton.jit
def _accumulate(q, k, v, seen, top, total, attended, scale):
    """One step of the online softmax. k, v: [keys, size]; seen: [queries, keys]."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shares = tl.exp(scores - safe[:, None])
    fade = tl.exp(top - safe)
    attended = attended * fade[:, None]
    attended = tl.dot(shares.to(v.dtype), v, attended, input_precision="ieee")
    return higher, total * fade + tl.sum(shares, 1), attended


@triton.jit
def _attend(
    qkv,
    cache,
    slots,
    limits,
    requests,
    starts,
    firsts,
    counts,
    rotations,
    norm_weight,
    sinks,
    out,
    partial,
    arrivals,
    side_stride,
    slots_stride,
    last_position,
    eps,
    scale,
    window,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    FRESH: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    request, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    table_row = tl.load(requests + request).to(tl.int64)
    start = tl.load(starts + request).to(tl.int32)
    first = tl.load(firsts + request).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    tiles = tl.cdiv(start, KEYS)
    share = tl.maximum(tl.cdiv(tiles, SPLITS), 1)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split >= active:
        return
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    lane = tl.arange(0, SIZE)[None, :]
    index = tl.arange(0, QUERIES * GROUP)
    row, head = index // GROUP, kv_head * GROUP + index % GROUP
    own = (row < count)[:, None]
    position = start + row
    q = _normed_rotated(
        qkv,
        ((first + row) * width + head * SIZE)[:, None],
        own,
        norm_weight,
        rotations,
        tl.minimum(position, last_position - 1)[:, None],
        eps,
        SIZE,
        NORM,
    ).to(cache.dtype.element_ty)
    top = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES * GROUP], tl.float32)
    attended = tl.zeros([QUERIES * GROUP, SIZE], tl.float32)
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        key_position = tile * KEYS + tl.arange(0, KEYS)
        known = key_position < start
        slot = tl.load(slots + table_row * slots_stride + key_position, mask=known, other=0)
        at = ((slot.to(tl.int64) * KV_HEADS + kv_head) * SIZE)[:, None] + lane
        k = tl.load(cache + at, mask=known[:, None], other=0.0)
        v = tl.load(cache + side_stride + at, mask=known[:, None], other=0.0)
        seen = known[None, :] & own
        if WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - window)
        top, total, attended = _accumulate(q, k, v, seen, top, total, attended, scale)
    if split == active - 1:
        fresh = tl.arange(0, FRESH)
        real = fresh < count
        key_position = start + fresh
        at = ((first + fresh) * width + (HEADS + kv_head) * SIZE)[:, None]
        k = _normed_rotated(
            qkv,
            at,
            real[:, None],
            norm_weight + SIZE,
            rotations,
            tl.minimum(key_position, last_position - 1)[:, None],
            eps,
            SIZE,
            NORM,
        ).to(cache.dtype.element_ty)
        v = tl.load(qkv + at + KV_HEADS * SIZE + lane, mask=real[:, None], other=0.0)
        writes = real & (key_position < tl.load(limits + table_row))
        slot = tl.load(slots + table_row * slots_stride + key_position, mask=writes, other=0)
        at = ((slot.to(tl.int64) * KV_HEADS + kv_head) * SIZE)[:, None] + lane
        tl.store(cache + at, k, mask=writes[:, None])
        tl.store(cache + side_stride + at, v, mask=writes[:, None])
        seen = real[None, :] & (fresh[None, :] <= row[:, None]) & own
        if WINDOW:
            seen = seen & (key_position[None, :] > position[:, None] - window)
        top, total, attended = _accumulate(q, k, v, seen, top, total, attended, scale)
    pair = request * KV_HEADS + kv_head
    if active > 1:
        part = partial + (pair * SPLITS * QUERIES * GROUP + index).to(tl.int64) * (SIZE + 2)
        step: tl.constexpr = QUERIES * GROUP * (SIZE + 2)
        tl.store(part[:, None] + split * step + lane, attended)
        tl.store(part + split * step + SIZE, top)
        tl.store(part + split * step + SIZE + 1, total)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + pair, 1, sem="acq_rel") != active - 1:
            return
        tl.store(arrivals + pair, 0)
        tl.debug_barrier()
        top = tl.full([QUERIES * GROUP], float("-inf"), tl.float32)
        total = tl.zeros([QUERIES * GROUP], tl.float32)
        attended = tl.zeros([QUERIES * GROUP, SIZE], tl.float32)
        for other in range(active):
            other_top = tl.load(part + other * step + SIZE, cache_modifier=".cg")
            other_total = tl.load(part + other * step + SIZE + 1, cache_modifier=".cg")
            other_attended = tl.load(part[:, None] + other * step + lane, cache_modifier=".cg")
            higher = tl.maximum(top, other_top)
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            mine, theirs = tl.exp(top - safe), tl.exp(other_top - safe)
            total = total * mine + other_total * theirs
            attended = attended * mine[:, None] + other_attended * theirs[:, None]
            top = higher
    if SINKS:
        total += tl.exp(tl.load(sinks + head).to(tl.float32) - top)
    y = attended / tl.where(total == 0.0, 1.0, total)[:, None]
    at = ((first + row) * HEADS * SIZE + head * SIZE)[:, None] + lane
    tl.store(out + at, y.to(out.dtype.element_ty), mask=own)


def store(
    qkv: Tensor, heads: Heads, cache: Tensor, positions: Tensor, slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference, in the product's place."""
    norm, total = heads.norm_weight, heads.query + 2 * heads.key_value
    _store[(len(qkv),)](
        qkv,
        cache,
        positions,
        slots,
        heads.rotations,
        qkv if norm is None else norm,
        cache.stride(0),
        heads.eps,
        HEADS=heads.query,
        KV_HEADS=heads.key_value,
        SIZE=heads.size,
        TOTAL=triton.next_power_of_2(total),
        NORM=norm is not None,
        num_warps=4,
    )
    both = qkv.view(len(qkv), total, heads.size)
    query, key, value = both.split((heads.query, heads.key_value, heads.key_value), dim=1)
    return query, key, value


@triton.jit
def _store(
    qkv,
    cache,
    positions,
    slots,
    rotations,
    norm_weight,
    side_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TOTAL: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, TOTAL)[:, None]
    lane = tl.arange(0, SIZE)[None, :]
    turned = head < HEADS + KV_HEADS
    weight = norm_weight + tl.where(head < HEADS, 0, SIZE)
    at = row * (HEADS + 2 * KV_HEADS) * SIZE + head * SIZE
    position = tl.load(positions + row)
    x = _normed_rotated(qkv, at, turned, weight, rotations, position, eps, SIZE, NORM)
    x = x.to(cache.dtype.element_ty)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    v = tl.load(qkv + at + lane, mask=is_value, other=0.0)
    # every element is read before any is overwritten
    tl.debug_barrier()
    tl.store(qkv + at + lane, x, mask=turned)
    slot = tl.load(slots + row).to(tl.int64) * KV_HEADS * SIZE
    key_at = slot + (head - HEADS) * SIZE + lane
    tl.store(cache + key_at, x, mask=turned & (head >= HEADS))
    value_at = side_stride + slot + (head - HEADS - KV_HEADS) * SIZE + lane
    tl.store(cache + value_at, v, mask=is_value)

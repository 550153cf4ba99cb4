"""From a layer's q, k, v product to attended values in one launch, where requests are few.

Of the programs of a request and of heads that share keys, one takes the rows' own keys and values,
which it norms, rotates and writes; the others share the older ones. Those are loaded while the
product still runs, since nothing of them depends on it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.cached_attention import PassRows, QKVSpec
from peagle.ops.triton.attention_parts import (
    LOG2E,
    arrived,
    keys_at,
    merged,
    normed_rotated,
    normed_values,
    turns,
    weighed,
    write,
)
from peagle.ops.triton.cached_attention import attend, heads_together, store
from peagle.ops.triton.launch import announce, counters, multiprocessors, overlap, wait

KEYS = 64
"""Keys of one tile."""
ROWS = 16
"""Lines of one program: a request's rows times the heads that share keys."""
HEAD_BYTES = 256
"""Largest head. With more of either, registers let too few programs run at once."""
MOST_PARTS = 7
"""Most parts of the older keys: merging takes longer with each."""
SHAPES = ((8, 2, 128), (4, 3, 168))
"""Warps of a program, the programs that a multiprocessor holds, and the registers of a thread that
allow it. One program more than fit at once would make everything after it wait."""


def attend_product(
    qkv: Tensor, spec: QKVSpec, cache: Tensor, rows: PassRows, settled: bool = False
) -> Tensor:
    """As the reference."""
    requests, most = len(rows.requests), triton.next_power_of_2(rows.most)
    group = heads_together(requests, most, spec)
    sets = spec.num_heads // group
    padded = triton.next_power_of_2(group)
    parts, warps, registers = _parts(requests * sets, multiprocessors(qkv))
    fits = most * padded <= ROWS and spec.head_dim * qkv.element_size() <= HEAD_BYTES
    if not (parts and fits):
        query, _, _ = store(qkv, spec, cache, rows.positions, rows.writes)
        return attend(query, spec, cache, rows)
    out = qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
    partial = torch.empty(
        requests * sets * (parts + 1) * ROWS * (spec.head_dim + 2),
        dtype=torch.float32,
        device=qkv.device,
    )
    norm = spec.norm_weight
    _attend_product[(requests, sets, parts + 1)](
        qkv,
        cache,
        rows.slots,
        rows.limits,
        rows.requests,
        rows.starts,
        rows.firsts,
        rows.counts,
        spec.rotations,
        qkv if norm is None else norm,
        qkv if spec.sinks is None else spec.sinks,
        out,
        partial,
        counters(qkv.device, requests * sets),
        cache.stride(0),
        rows.slots.stride(0),
        len(spec.rotations) - 1,
        spec.eps,
        spec.softmax_scale * LOG2E.value,
        0 if spec.window is None else spec.window,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        SIZE=spec.head_dim,
        GROUP=group,
        PADDED=padded,
        ROWS=ROWS,
        KEYS=KEYS,
        PARTS=parts + 1,
        NORM=norm is not None,
        V_NORM=spec.v_norm,
        WINDOW=spec.window is not None,
        SINKS=spec.sinks is not None,
        SETTLED=settled,
        **overlap(qkv),
        num_warps=warps,
        maxnreg=registers,
        num_stages=3,
    )
    return out


def _parts(sets: int, processors: int) -> tuple[int, int, int]:
    """Programs that share a set's older keys, their warps and registers; none for many sets."""
    for warps, together, registers in SHAPES:
        parts = min(together * processors // sets - 1, MOST_PARTS)
        if parts > 1:
            return parts, warps, registers
    return 0, 0, 0


@triton.jit
def _attend_product(
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
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    SETTLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    announce(OVERLAP)
    if not SETTLED:
        wait(OVERLAP)
    request, heads, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = heads * GROUP // (HEADS // KV_HEADS)
    table_row = tl.load(requests + request).to(tl.int64)
    start = tl.load(starts + request).to(tl.int32)
    first = tl.load(firsts + request).to(tl.int64)
    count = tl.load(counts + request).to(tl.int32)
    stop = tl.minimum(start + count, tl.load(limits + table_row).to(tl.int32))
    older = tl.minimum(start, stop)
    skipped = 0
    if WINDOW:  # what is before all windows is not read
        skipped = tl.maximum(start - window + 1, 0) // KEYS
    tiles = tl.maximum(tl.cdiv(older, KEYS) - skipped, 0)
    share = tl.maximum(tl.cdiv(tiles, PARTS - 1), 1)
    active = tl.cdiv(tiles, share) + 1
    if part >= active:
        return
    takes_own = part == 0
    lane = tl.arange(0, SIZE)[None, :]
    # the first tile of older keys, before the product is there
    table = slots + table_row * slots_stride
    tile = skipped + (part - 1) * share
    end = tl.minimum(tile + share, skipped + tiles)
    key = tl.arange(0, KEYS)
    position = tile * KEYS + key
    known = (position < older) & (part > 0)
    k, v = keys_at(cache, table, position, known, kv_head, side_stride, KV_HEADS, SIZE)
    # where the rows' own keys go
    own = tl.arange(0, ROWS)
    own_position = start + own
    is_own = (own_position < stop) & takes_own
    own_slot = tl.load(table + own_position, mask=is_own, other=0).to(tl.int64)
    write_at = ((own_slot * KV_HEADS + kv_head) * SIZE)[:, None] + lane
    turned = tl.minimum(own_position, last_position)[:, None]
    k_turns, k_crossed = turns(rotations, turned, norm_weight + SIZE, SIZE, NORM)
    # heads that pad a group to a power of two take part as rows that are not read
    index = tl.arange(0, ROWS)
    row, head = index // PADDED, heads * GROUP + index % PADDED
    real = ((row < count) & (index % PADDED < GROUP))[:, None]
    row_position = (start + row)[:, None]
    turned = tl.minimum(row_position, last_position)
    q_turns, q_crossed = turns(rotations, turned, norm_weight, SIZE, NORM)
    if SETTLED:
        wait(OVERLAP)
    width: tl.constexpr = (HEADS + 2 * KV_HEADS) * SIZE
    own_at = qkv + ((first + own) * width + (HEADS + kv_head) * SIZE)[:, None]
    own_v = tl.load(own_at + KV_HEADS * SIZE + lane, mask=is_own[:, None], other=0.0)
    if V_NORM:
        own_v = normed_values(own_v, eps, SIZE)
    own_k = normed_rotated(own_at, is_own[:, None], k_turns, k_crossed, eps, SIZE, NORM)
    own_k = own_k.to(k.dtype)
    query_at = qkv + ((first + row) * width + head * SIZE)[:, None]
    q = normed_rotated(query_at, real, q_turns, q_crossed, eps, SIZE, NORM).to(k.dtype)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, SIZE], tl.float32)
    if takes_own:
        # sets of heads that share keys all have them: one writes
        writes = is_own[:, None] & (heads * GROUP % (HEADS // KV_HEADS) == 0)
        tl.store(cache + write_at, own_k, mask=writes)
        tl.store(cache + side_stride + write_at, own_v, mask=writes)
        near = is_own[None, :] & real & (own_position[None, :] <= row_position)
        if WINDOW:
            near = near & (own_position[None, :] > row_position - window)
        top, total, attended = weighed(q, own_k, own_v, near, scale, top, total, attended)
    else:
        seen = known[None, :] & real
        if WINDOW:
            seen = seen & (position[None, :] > row_position - window)
        top, total, attended = weighed(q, k, v, seen, scale, top, total, attended)
        for more in range(tile + 1, end):
            position = more * KEYS + key
            known = position < older
            k, v = keys_at(cache, table, position, known, kv_head, side_stride, KV_HEADS, SIZE)
            seen = known[None, :] & real
            if WINDOW:
                seen = seen & (position[None, :] > row_position - window)
            top, total, attended = weighed(q, k, v, seen, scale, top, total, attended)
    if active > 1:
        pair = request * (HEADS // GROUP) + heads
        base = partial + pair.to(tl.int64) * PARTS * ROWS * (SIZE + 2)
        count_at = arrivals + pair
        if not arrived(top, total, attended, base, part, count_at, active, PARTS, ROWS, SIZE):
            return
        top, total, attended = merged(base, active, PARTS, ROWS, SIZE)
    out_at = out + ((first + row) * HEADS * SIZE + head * SIZE)[:, None] + lane
    write(top, total, attended, sinks, head, out_at, real, HEADS, SINKS)

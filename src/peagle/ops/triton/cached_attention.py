"""Attention of decoding: norms, rotation and KV write in one launch, split KV in another.

A program of `attend` takes one request, query heads that share a key-value head and a part of the
context; all rows of the request share its keys. Whichever program of a request and
head is the last to finish merges the parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.cached_attention import FIXED_ROWS, AttentionHeads, PassRows, QKVSpec
from peagle.ops.triton.attention_parts import (
    LOG2E,
    Contexts,
    arrived,
    kept_of,
    keys_at,
    merged,
    normed_rotated,
    normed_values,
    turns,
    weighed,
    write,
)
from peagle.ops.triton.launch import begin, counters, overlap, shared_memory

PROGRAMS = 528
"""Four on each of an H200's multiprocessors."""
KEYS = 64
"""Keys of a tile."""
WIDE_NUMBERS = 32 * 512
"""Most numbers of a program's rows, where heads are wider than 128."""
STORED = 4096
"""Numbers of a row that one program normalizes, rotates and stores."""
MOST_PARTS = 8
"""Most parts of one request's context: to merge them takes longer with each."""
FIXED_NUMBERS = 64 * 128
"""Most numbers of a program's rows where results must not depend on the load."""


def attend(query: Tensor, spec: AttentionHeads, cache: Tensor, rows: PassRows) -> Tensor:
    """As the reference."""
    requests, most = len(rows.requests), triton.next_power_of_2(rows.most)
    if spec.batch_invariant:  # one division, whatever the load
        most = max(most, FIXED_ROWS)
        group = fixed_group(spec)
    else:
        group = heads_together(requests, most, spec)
    sets = spec.num_heads // group
    padded = triton.next_power_of_2(group)
    # a tensor core's left operand has at least 16 lines
    queries = max(most, triton.cdiv(16, padded))
    parts = 1 if spec.batch_invariant else _parts(requests * sets, rows.slots.shape[1])
    out = query.new_empty(len(query), spec.num_heads * spec.head_dim)
    left = requests * sets * parts * queries * padded * (spec.head_dim + 2) if parts > 1 else 1
    partial = torch.empty(left, dtype=torch.float32, device=query.device)
    deep = parts == 1 and queries * padded == 32
    keys, stages = _fitting(query, queries * padded, 5 if deep else 3)
    _attend[(requests, sets, parts)](
        query,
        cache,
        Contexts.of(rows),
        spec.sinks,
        out,
        partial,
        counters(query.device, requests * sets),
        query.stride(0),
        cache.stride(0),
        rows.slots.stride(0),
        spec.softmax_scale * LOG2E.value,
        spec.window,
        spec.kv_scales,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        SIZE=spec.head_dim,
        GROUP=group,
        ROWS=queries * padded,
        PADDED=padded,
        KEYS=keys,
        PARTS=parts,
        TREE=rows.ancestors is not None,
        CAUSAL=spec.causal,
        **overlap(query),
        num_warps=_warps(queries * padded, spec.head_dim),
        num_stages=stages,
    )
    return out


def _warps(rows: int, head_dim: int) -> int:
    """Enough that the sums of a program's rows stay in registers."""
    return 8 if rows > 64 or rows * head_dim > 64 * 128 else 4


def heads_together(requests: int, most: int, spec: AttentionHeads) -> int:
    """Query heads in one program: all that share keys, fewer where there are too few programs, or
    where the sums of wide heads would not fit into registers."""
    group = spec.num_heads // spec.num_kv_heads

    def too_many() -> bool:
        few = requests * spec.num_heads // group < PROGRAMS // 2
        return few or (spec.head_dim > 128 and group * most * spec.head_dim > WIDE_NUMBERS)

    while group % 2 == 0 and group * most > 16 and too_many():
        group //= 2
    return group


def fixed_group(spec: AttentionHeads) -> int:
    """Query heads in one program where results must not depend on the load: as many as four warps
    have room for."""
    group = spec.num_heads // spec.num_kv_heads
    while group % 2 == 0 and group * FIXED_ROWS * spec.head_dim > FIXED_NUMBERS:
        group //= 2
    return group


def _fitting(query: Tensor, queries: int, stages: int) -> tuple[int, int]:
    """Keys a step and stages for which a processor has the shared memory.

    A tile's slots are loaded a stage before its keys, so that five stages hold two tiles; room is
    counted as if each stage but one held a tile.
    """
    unit, keys = query.shape[-1] * query.element_size(), KEYS

    def needed() -> int:
        return (queries + 2 * (stages - 1) * keys) * unit + queries * keys * query.element_size()

    while needed() > shared_memory(query) and (stages, keys) != (2, 16):
        stages, keys = (stages - 1, keys) if stages > 2 else (2, keys // 2)
    return keys, stages


def _parts(sets: int, context: int) -> int:
    """Parts of a context, a power of two, so that there is work for every multiprocessor."""
    wanted = min(PROGRAMS // sets, triton.cdiv(context, 64), MOST_PARTS)
    return 1 << max(wanted.bit_length() - 1, 0)


@triton.jit
def _attend(
    query,
    cache,
    contexts,
    sinks,
    out,
    partial,
    arrivals,
    query_stride,
    side_stride,
    slots_stride,
    scale,
    window,
    scales,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    TREE: tl.constexpr,
    CAUSAL: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    request, heads, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head = heads * GROUP // (HEADS // KV_HEADS)
    table_row = tl.load(contexts.requests + request).to(tl.int64)
    start = tl.load(contexts.starts + request).to(tl.int32)
    first = tl.load(contexts.firsts + request).to(tl.int64)
    count = tl.load(contexts.counts + request).to(tl.int32)
    stop = tl.minimum(start + count, tl.load(contexts.limits + table_row).to(tl.int32))
    skipped = 0
    if window is not None:  # what is before all windows is not read
        skipped = tl.maximum(start - window + 1, 0) // KEYS
    tiles = tl.cdiv(stop, KEYS) - skipped
    # how long a context is the device knows alone: the grid has programs for the longest
    share = tl.maximum(tl.cdiv(tiles, PARTS), 1)
    active = tl.maximum(tl.cdiv(tiles, share), 1)
    if split >= active:
        return
    lane = tl.arange(0, SIZE)[None, :]
    # heads that pad a group to a power of two take part as rows that are not read
    index = tl.arange(0, ROWS)
    row, head = index // PADDED, heads * GROUP + index % PADDED
    own = ((row < count) & (index % PADDED < GROUP))[:, None]
    place = (start + row)[:, None]
    at = ((first + row) * query_stride + head * SIZE)[:, None] + lane
    q = tl.load(query + at, mask=own, other=0.0)
    position = place
    if TREE:
        # rows of a tree lie one behind another, but stand where their depth says
        words = tl.load(contexts.ancestors + first + row, mask=row < count, other=0)[:, None]
        position = tl.load(contexts.positions + first + row, mask=row < count, other=0)[:, None]
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    attended = tl.zeros([ROWS, SIZE], tl.float32)
    table, lanes = contexts.slots + table_row * slots_stride, kv_head * SIZE + lane
    for tile in range(split * share, tl.minimum((split + 1) * share, tiles)):
        key_position = (skipped + tile) * KEYS + tl.arange(0, KEYS)
        known = key_position < stop
        slots_at, width = table + key_position, KV_HEADS * SIZE
        k, v = keys_at(cache, slots_at, known, lanes, side_stride, scales, q.dtype, width)
        seen = known[None, :] & own
        if CAUSAL:
            seen = seen & (key_position[None, :] <= place)
        if window is not None:
            seen = seen & (key_position[None, :] > position - window)
        if TREE:
            bit = tl.minimum(tl.maximum(key_position - start, 0), 31)[None, :]
            seen = seen & ((key_position[None, :] < start) | ((words >> bit) & 1 == 1))
        top, total, attended = weighed(q, k, v, seen, scale, top, total, attended)
    if active > 1:
        pair = request * (HEADS // GROUP) + heads
        base = partial + pair.to(tl.int64) * PARTS * ROWS * (SIZE + 2)
        count_at = arrivals + pair
        if not arrived(top, total, attended, base, split, count_at, active, PARTS):
            return
        top, total, attended = merged(base, active, PARTS, ROWS, SIZE)
    out_at = out + ((first + row) * HEADS * SIZE + head * SIZE)[:, None] + lane
    write(top, total, attended, sinks, head, out_at, own, HEADS)


def store(
    qkv: Tensor, spec: QKVSpec, cache: Tensor, positions: Tensor, writes: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same as the reference; queries, keys and values overwrite the product."""
    norm, total = spec.norm_weight, spec.num_heads + 2 * spec.num_kv_heads
    together = STORED // spec.head_dim
    _store[(len(qkv), triton.cdiv(total, together))](
        qkv,
        cache,
        positions,
        writes,
        spec.rotations,
        qkv if norm is None else norm,
        qkv.stride(0),
        cache.stride(0),
        len(spec.rotations) - 1,
        spec.eps,
        spec.kv_scales,
        HEADS=spec.num_heads,
        KV_HEADS=spec.num_kv_heads,
        SIZE=spec.head_dim,
        WIDTH=spec.rotations.shape[-1],
        TOGETHER=together,
        NORM=norm is not None,
        V_NORM=spec.v_norm,
        **overlap(qkv),
        num_warps=4,
    )
    both = qkv.unflatten(1, (total, spec.head_dim))
    query, key, value = both.split((spec.num_heads, spec.num_kv_heads, spec.num_kv_heads), dim=1)
    return query, key, value


@triton.jit
def _store(
    qkv,
    cache,
    positions,
    writes,
    rotations,
    norm_weight,
    row_stride,
    side_stride,
    last_position,
    eps,
    scales,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOGETHER: tl.constexpr,
    NORM: tl.constexpr,
    V_NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER))[:, None]
    lane = tl.arange(0, SIZE)[None, :]
    turned = head < HEADS + KV_HEADS
    weight = norm_weight + tl.where(head < HEADS, 0, SIZE)
    at = row * row_stride + head * SIZE
    write = tl.load(writes + row).to(tl.int64)
    position = tl.minimum(tl.load(positions + row), last_position)
    own, crossed = turns(rotations, position, weight, SIZE, WIDTH, NORM)
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    v = tl.load(qkv + at + lane, mask=is_value, other=0.0)
    x = normed_rotated(qkv + at, turned, own, crossed, eps, SIZE, WIDTH, NORM)
    kind: tl.constexpr = qkv.dtype.element_ty
    kept: tl.constexpr = cache.dtype.element_ty
    x = x.to(kind)
    if V_NORM:
        v = normed_values(v, eps, SIZE)
    k_kept, v_kept = x, v
    if kept != kind:
        k_scale, v_scale = scales
        k_kept = kept_of(x.to(tl.float32), k_scale, kept)
        v_kept = kept_of(v.to(tl.float32), v_scale, kept)
        x = tl.where(head < HEADS, x, (k_kept * k_scale).to(kind))
        v = (v_kept * v_scale).to(kind)
    # every element is read before any is overwritten
    tl.debug_barrier()
    tl.store(qkv + at + lane, x, mask=turned)
    if V_NORM or kept != kind:
        tl.store(qkv + at + lane, v, mask=is_value)
    written = write >= 0
    key_at = (write * KV_HEADS + head - HEADS) * SIZE + lane
    tl.store(cache + key_at, k_kept.to(kept), mask=turned & (head >= HEADS) & written)
    value_at = side_stride + key_at - KV_HEADS * SIZE
    tl.store(cache + value_at, v_kept.to(kept), mask=is_value & written)

"""From a layer's q, k, v product to attended values in one launch, with Hopper's matrix products.

One program takes a part of a request's context (`division`) and all query heads that share keys.
Keys and values come through a ring in shared memory, ahead of what is multiplied. Four warps need
64 lines as a product's left operand. Where a request's rows times the heads that share keys fill
them, these are the left operand in small programs, so that no warp needs what another has; fewer,
all in large programs, and all beside a cache of 8 bits (`narrow`), are columns beside the cache.

The first tile of a context is the rows' own keys, which their program norms, rotates and writes;
older ones are on their way while the product still runs, wherever a program is there by then.
Whichever program of a request and head is the last to finish merges the parts.

    a request's context, in tiles     [ own rows | older 0 | older 1 | older 2 | older 3 | older 4 ]
    programs of one key-value head     ── part 0 ──────────  ── part 1 ────────  ── part 2 ────────

    a program   fetch older tiles into the ring ··· wait for the product ··· rotate, write own keys
                then for each tile: scores = q kᵀ → masked → softmax so far → values added
                leave its part; the last program merges all parts and writes the attended values
"""

from dataclasses import replace

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.cached_attention import PassRows, QKVSpec
from peagle.ops.triton.attention_parts import LOG2E, Contexts
from peagle.ops.triton.gluon import meet
from peagle.ops.triton.hopper_attention.division import divide
from peagle.ops.triton.hopper_attention.heads import heads_at, position_of, turned, turns, values_at
from peagle.ops.triton.hopper_attention.narrow import evens_first
from peagle.ops.triton.hopper_attention.parts import leave, merged, write
from peagle.ops.triton.hopper_attention.tiles import attend_tiles, fetch_first, write_own
from peagle.ops.triton.hopper_attention.tiling import LEFT_LINES, TILE, WIDE, WIDE_LINES, Tiling
from peagle.ops.triton.launch import counters, multiprocessors
from peagle.ops.weight import E4M3

HEAD_DIMS = (64, 128, 256)
NARROW_PROGRAMS = {8: 4, 16: 4, 32: 3, 64: 2}
"""Programs that share a multiprocessor where the cache is of 8 bits, by their lines: together they
widen as fast as memory reads."""


def takes(spec: QKVSpec, cache: Tensor, rows: PassRows) -> bool:
    """Whether the kernel computes a layer's attention, and faster than Triton's does.

    It takes heads that turn as a whole, and a cache of 16 bits or, of heads up to 128 wide, E4M3.
    """
    kept = torch.bfloat16, torch.float16, *((E4M3,) if spec.head_dim < WIDE else ())
    whole = spec.head_dim in HEAD_DIMS and spec.rotations.shape[-1] == spec.head_dim
    most = LEFT_LINES if spec.head_dim < WIDE else WIDE_LINES
    return whole and cache.dtype in kept and _lines(spec, rows) <= most


def shares_of(rows: PassRows, spec: QKVSpec, cache: Tensor) -> Tensor:
    """How contexts are divided among programs, for any layer of a pass."""
    tiling = _tiling(spec, rows, cache.dtype == E4M3)
    room = multiprocessors(rows.starts) * tiling.together
    return divide(rows, tiling.kv_heads, tiling.keys, tiling.least_share, room)


def attend_product(
    qkv: Tensor, spec: QKVSpec, cache: Tensor, rows: PassRows, settled: bool = False
) -> Tensor:
    """The same as the reference.

    settled: whether rows and older keys may be read before earlier launches are done.
    """
    if rows.shares is None:  # what is launched here is not settled
        rows, settled = replace(rows, shares=shares_of(rows, spec, cache)), False
    shares, narrow = rows.shares, cache.dtype == E4M3
    tiling = _tiling(spec, rows, narrow, settled)
    assert shares is not None
    out = qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
    codes = cache.view(torch.int16) if narrow else cache
    items = len(shares) * spec.num_kv_heads
    partial = torch.empty(items * tiling.partial, dtype=torch.float32, device=qkv.device)
    # an item's heads side by side, so that items that are not used come last
    _attend_part[(spec.num_kv_heads, len(shares))](
        qkv,
        cache,
        codes,
        shares,
        Contexts.of(rows),
        spec.rotations,
        qkv if spec.norm_weight is None else spec.norm_weight,
        qkv if spec.sinks is None else spec.sinks,
        out,
        partial,
        counters(qkv.device, len(rows.requests) * spec.num_kv_heads),
        cache.stride(0),
        codes.stride(0),
        rows.slots.stride(0),
        len(spec.rotations) - 1,
        spec.eps,
        spec.softmax_scale * LOG2E.value,
        0 if spec.window is None else spec.window,
        *spec.kv_scales,
        TILING=tiling,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        launch_pdl=True,
    )
    return out


def _tiling(spec: QKVSpec, rows: PassRows, narrow: bool = False, settled: bool = False) -> Tiling:
    lines, pairs = _lines(spec, rows), len(rows.requests) * spec.num_kv_heads
    processors = multiprocessors(rows.starts)
    # four requests' chains of 16 rows, of 8 heads each, take 127 us with a layer's products in
    # large programs and 138 in small ones; eight requests' take longer in large ones
    few_pairs = 4 * pairs <= processors
    few_lines = lines < LEFT_LINES or rows.ancestors is not None or few_pairs
    sizes = spec.head_dim, _padded(spec), processors
    together = NARROW_PROGRAMS[lines] if narrow else programs(pairs, few_lines, *sizes)
    if together == 4 and 2 * lines == LEFT_LINES:  # by keys four would have no room
        lines = LEFT_LINES
    if spec.head_dim == WIDE and lines == WIDE_LINES:  # two would have no room
        together = 1
    return Tiling(
        heads=spec.num_heads,
        kv_heads=spec.num_kv_heads,
        size=spec.head_dim,
        padded=_padded(spec),
        lines=lines,
        together=together,
        norm=spec.norm_weight is not None,
        window=spec.window is not None,
        sinks=spec.sinks is not None,
        tree=rows.ancestors is not None,
        settled=settled,
        causal=spec.causal,
        narrow=narrow,
        scaled=narrow and spec.kv_scales != (1.0, 1.0),
        v_norm=spec.v_norm,
    )


def programs(pairs: int, few_lines: bool, size: int, padded: int, processors: int) -> int:
    """How many programs are to share a multiprocessor, given pairs of a request and key-value head.

    A large program has a multiprocessor to itself, where lines may be columns; programs whose rows
    are the left operand are small. Four small ones share it where a pair would else wait for a
    second turn, but not where every head has keys of its own: a request's rows would not fit into
    their tile.
    """
    if 2 * pairs <= processors and size >= 128 and few_lines:
        return 1
    return 4 if pairs > 2 * processors and size == 128 and padded > 1 else 2


def _padded(spec: QKVSpec) -> int:
    return triton.next_power_of_2(spec.num_heads // spec.num_kv_heads)


def _lines(spec: QKVSpec, rows: PassRows) -> int:
    """A request's rows times the heads that share keys."""
    return max(8, triton.next_power_of_2(rows.most) * _padded(spec))


@gluon.jit
def _spanned(contexts, request, part, parts, window, TILING: gl.constexpr):
    """A request's table row, first row and rows, its parts that have tiles, and a part's span."""
    table_row = gl.load(contexts.requests + request).to(gl.int64)
    start = gl.load(contexts.starts + request).to(gl.int32)
    first = gl.load(contexts.firsts + request).to(gl.int64)
    count = gl.load(contexts.counts + request).to(gl.int32)
    stop = gl.minimum(start + count, gl.load(contexts.limits + table_row).to(gl.int32))
    # a row of the table that pads the batch has no slot at all: its stop is 0, before its start
    older = gl.minimum(start, stop)
    skipped = 0
    if TILING.window:  # what is before all windows is not read
        skipped = gl.maximum(start - window + 1, 0) // TILING.keys
    tiles = 1 + gl.maximum((older + TILING.keys - 1) // TILING.keys - skipped, 0)
    # `divide` counts contexts in full, once a pass: in a layer with a window fewer parts have tiles
    share = gl.maximum((tiles + parts - 1) // parts, TILING.least_share)
    begin = part * share
    end = gl.minimum(begin + share, tiles)
    active = (tiles + share - 1) // share
    return table_row, first, count, active, (begin, end, start, stop, older, skipped)


@gluon.jit
def _attend_part(
    qkv,
    cache,
    codes,
    shares,
    contexts,
    rotations,
    norm_weight,
    sinks,
    out,
    partial,
    arrivals,
    side_stride,
    codes_stride,
    slots_stride,
    last_position,
    eps,
    scale,
    window,
    k_scale,
    v_scale,
    TILING: gl.constexpr,
):
    dtype: gl.constexpr = qkv.dtype.element_ty
    if not TILING.settled:
        # whose rows these are, and the older keys, may still be on their way
        gdc_wait()
    kv_head, item = gl.program_id(0), gl.program_id(1)
    request = gl.load(shares + 3 * item)
    if request < 0:
        return
    part, parts = gl.load(shares + 3 * item + 1), gl.load(shares + 3 * item + 2)
    spanned = _spanned(contexts, request, part, parts, window, TILING)
    table_row, first, count, active, span = spanned
    begin, end, start, stop, _, _ = span
    if begin >= end:
        return
    fetched: gl.constexpr = [TILING.places, TILING.keys, TILING.stored]
    ring = gl.allocate_shared_memory(codes.dtype.element_ty, fetched, TILING.ring)
    table = contexts.slots + table_row * slots_stride
    sides = (codes + kv_head * TILING.stored, codes_stride)
    found = fetch_first(ring, table, span, sides, TILING)
    # all that is known before the product is
    at_once: gl.constexpr = TILING.lines_at_once
    line = gl.arange(0, at_once, gl.SliceLayout(1, TILING.rows))
    own = gl.arange(0, TILING.own, gl.SliceLayout(1, TILING.rows))
    placed = (contexts.positions + first, contexts.ancestors + first, start, count)
    # drafts may reach beyond the longest context, where there is no rotation, nor a slot
    turned_at = gl.minimum(position_of(line // TILING.padded, placed, TILING), last_position)
    q_turns = turns(rotations, turned_at, norm_weight, TILING)
    own_turned_at = gl.minimum(position_of(own, placed, TILING), last_position)
    k_turns = turns(rotations, own_turned_at, norm_weight + TILING.size, TILING)
    kept = start + own < stop
    slot = gl.load(table + start + own, mask=kept, other=0)
    if TILING.settled:
        gdc_wait()
    # after the wait: so this launch is a fence for those behind it
    gdc_launch_dependents()
    of_own = qkv + (first + own) * TILING.width + (TILING.heads + kv_head) * TILING.size
    k = heads_at(of_own, kept, TILING)
    v = values_at(of_own + TILING.kv_heads * TILING.size, kept, eps, TILING)
    if begin == 0:
        own_k, of_head = turned(k, k_turns, eps, TILING).to(dtype), cache + kv_head * TILING.size
        write_own(own_k, v, slot, kept, ring, of_head, side_stride, (k_scale, v_scale), TILING)
    lines: gl.constexpr = [TILING.lines, TILING.size]
    asked = gl.allocate_shared_memory(dtype, lines, TILE)
    pieces: gl.constexpr = TILING.lines // at_once
    for piece in gl.static_range(pieces):
        of_request = piece * at_once + line
        row, head = of_request // TILING.padded, of_request % TILING.padded
        of_row = qkv + (first + row) * TILING.width + (kv_head * TILING.group + head) * TILING.size
        q = heads_at(of_row, (row < count) & (head < TILING.group), TILING)
        if piece > 0:  # the first piece's rotations were loaded before the wait
            turned_at = gl.minimum(position_of(row, placed, TILING), last_position)
            q_turns = turns(rotations, turned_at, norm_weight, TILING)
        q = turned(q, q_turns, eps, TILING).to(dtype)
        if TILING.narrow:
            q = evens_first(q, TILING)
        asked.slice(piece * at_once, at_once).store(q)
    scales = (scale, k_scale, v_scale)
    top, total, attended = attend_tiles(
        ring, asked, found, table, span, sides, placed, scales, window, TILING
    )
    if active > 1:
        pair = request * TILING.kv_heads + kv_head
        first_item = (item - part) * TILING.kv_heads + kv_head
        left = partial + first_item.to(gl.int64) * TILING.partial
        leave(top, total, attended, left, part, TILING)
        # all warps have left their numbers before the part counts
        meet()
        if gl.atomic_add(arrivals + pair, 1, sem="acq_rel") != active - 1:
            return
        # for the next launch, which finds counts at zero
        gl.store(arrivals + pair, 0)
        top, total, attended = merged(left, active, TILING)
    write(top, total, attended, sinks, out, kv_head, first, count, TILING)

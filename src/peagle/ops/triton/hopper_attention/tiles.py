"""How tiles of keys and values come into the ring, and what rows draw from them.

A span is (first tile, end, the rows' first position, end of those with a slot, end of older ones,
tiles before all windows). Tile 0 is the rows' own; older keys follow from tile 1 on. The ring takes
halves of tiles, in turn keys and values: half 2 i has the keys of a span's tile i, 2 i + 1 its
values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from peagle.ops.triton.gluon import codes_of, meet
from peagle.ops.triton.hopper_attention.heads import position_of
from peagle.ops.triton.hopper_attention.narrow import in_order, kept_of, keys_of, values_of
from peagle.ops.triton.hopper_attention.tiling import TILE


@gluon.jit
def fetch_first(ring, table, span, sides, TILING: gl.constexpr):
    """Ask for as many halves as the ring is ahead; returns the slots of the tile that is next."""
    begin, _, _, _, _, _ = span
    found = _slots(begin, table, span, TILING)
    following = found
    ahead: gl.constexpr = TILING.ahead
    for half in gl.static_range(ahead):
        if half % 2 == 0:
            following = _slots(begin + half // 2 + 1, table, span, TILING)
        _fetch(half, half % 2, ring, found, span, sides, TILING)
        if half % 2 == 1:
            found = following
    return found


@gluon.jit
def write_own(k, v, slot, kept, ring, of_head, side_stride, scales, TILING: gl.constexpr):
    """The rows' own keys and values, [own, size], into the cache and the ring's first places."""
    lane = gl.arange(0, TILING.size, gl.SliceLayout(0, TILING.rows))[None, :]
    at = of_head + (slot.to(gl.int64) * (TILING.kv_heads * TILING.size))[:, None] + lane
    if TILING.narrow:  # what all readers see is what is kept
        k_scale, v_scale = scales
        narrow: gl.constexpr = of_head.dtype.element_ty
        k, v = kept_of(k, k_scale, narrow), kept_of(v, v_scale, narrow)
    gl.store(at, k, mask=kept[:, None])
    gl.store(at + side_stride, v, mask=kept[:, None])
    if TILING.narrow:
        k, v = codes_of(k), codes_of(v)
    # no share of what lies behind them, but zero times anything must be zero
    tile: gl.constexpr = [TILING.keys, TILING.stored]
    layout: gl.constexpr = TILING.fetched
    # `_fetch` leaves out tile 0, so that its places are free
    ring.index(1).store(gl.zeros(tile, v.dtype, layout))
    meet()
    ring.index(0).slice(0, TILING.own).store(k)
    ring.index(1).slice(0, TILING.own).store(v)


@gluon.jit
def attend_tiles(
    ring, asked, found, table, span, sides, placed, scales, window, TILING: gl.constexpr
):
    """The highest scores, sums of shares, [lines], and what rows draw, [lines, size], of a span.

    The highest scores are rounded up to whole numbers, as in `attention_parts.weighed`: a row's
    result hardly depends on which rows come with it, nor greedy text on drafts to verify.

    asked: the queries in shared memory. found: slots of the tile that is next to be fetched.
    placed: as of `position_of`. scales: of scores, for powers of two, and of keys and values.
    """
    given = (ring, asked, found, table, span, sides, placed, scales, window)
    if TILING.by_rows:
        top, total, attended = _by_rows(given, TILING)
    else:
        top, total, attended = _by_keys(given, TILING)
    across: gl.constexpr = gl.SliceLayout(1, TILING.sums)
    attended = gl.convert_layout(attended, TILING.sums)
    return gl.convert_layout(top, across), gl.convert_layout(total, across), attended


@gluon.jit
def _by_rows(given, TILING: gl.constexpr):
    """Rows are the left operand: a warp has all keys of its own, and shares stay in registers."""
    ring, asked, found, table, span, sides, placed, scales, window = given
    scale, _, _ = scales
    begin, end, _, _, _, _ = span
    lines: gl.constexpr = TILING.lines
    line_keys: gl.constexpr = [TILING.lines, TILING.keys]
    line_dims: gl.constexpr = [TILING.lines, TILING.size]
    layout: gl.constexpr = TILING.scores
    drawn_layout: gl.constexpr = TILING.drawn
    share_layout: gl.constexpr = gl.DotOperandLayout(0, drawn_layout, 2)
    along: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.arange(0, lines, along) // TILING.padded
    row_position = position_of(row, placed, TILING)[:, None]
    ancestors = _ancestors(row, placed, TILING)[:, None]
    key = gl.arange(0, TILING.keys, gl.SliceLayout(0, layout))
    top = gl.full([lines], float("-inf"), gl.float32, along)
    total = gl.zeros([lines], gl.float32, along)
    attended = gl.zeros(line_dims, gl.float32, drawn_layout)
    # the ring while tile i is multiplied, six places that are filled four ahead:
    #
    #   half    2i-2 2i-1 │ 2i        2i+1     │ 2i+2 2i+3         `_arrived`: 2i and 2i+1 are there
    #           free      │ keys      values   │ on their way      and nobody reads 2i-2 and 2i-1
    #   next    2i+4 2i+5   asked for as soon as the product with the keys has begun
    #
    # crowded: four places filled three ahead, one half at a time (by keys three, two: one less)
    #
    #   half    2i-1 │ 2i   │ 2i+1 2i+2      while keys are multiplied 2i+3 takes the place of 2i-1,
    #                                        while values are, 2i+4 that of 2i
    for tile in range(begin, end):
        half = 2 * (tile - begin)
        # addresses of keys are read a tile before the keys are asked for
        following = _slots(tile + TILING.ahead // 2 + 1, table, span, TILING)
        _arrived(TILING)  # these keys, and no warp still reads the values before them
        keys, values = _places(half, ring, TILING)
        scores = gl.zeros(line_keys, gl.float32, layout)
        scores = warpgroup_mma(asked, keys.permute((1, 0)), scores, is_async=True)
        _fetch_behind_keys(half, ring, found, span, sides, TILING)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        position = _first_key(tile, span, TILING) + key[None, :]
        scores = _seen(
            scores * scale, tile, position, row_position, ancestors, span, window, TILING
        )
        higher = gl.maximum(top, gl.ceil(gl.max(scores, 1)))
        safe = gl.where(higher == float("-inf"), 0.0, higher)
        portion = gl.exp2(scores - safe[:, None])
        fade = gl.exp2(top - safe)
        top = higher
        # no other warp has keys of these lines
        total = total * fade + gl.sum(portion, 1)
        attended = attended * gl.convert_layout(fade, gl.SliceLayout(1, drawn_layout))[:, None]
        portion = gl.convert_layout(portion.to(asked.dtype), share_layout)
        if TILING.crowded:
            _arrived(TILING)  # these values, and no warp still reads their keys
        attended = warpgroup_mma(portion, values, attended, is_async=True)
        _fetch_behind_values(half, ring, (found, following), span, sides, TILING)
        found = following
        attended = warpgroup_mma_wait(0, deps=(attended,))
    return top, total, attended


@gluon.jit
def _by_keys(given, TILING: gl.constexpr):
    """Keys are the left operand, so that few rows are few columns: warps share each row's sums."""
    ring, asked, found, table, span, sides, placed, scales, window = given
    scale, k_scale, v_scale = scales
    begin, end, _, _, _, _ = span
    lines: gl.constexpr = TILING.lines
    tile_lines: gl.constexpr = [TILING.keys, TILING.lines]
    head_lines: gl.constexpr = [TILING.size, TILING.lines]
    shares = gl.allocate_shared_memory(asked.dtype, [lines, TILING.keys], TILE)
    layout: gl.constexpr = TILING.scores
    along: gl.constexpr = gl.SliceLayout(0, layout)
    row = gl.arange(0, lines, along) // TILING.padded
    row_position = position_of(row, placed, TILING)[None, :]
    ancestors = _ancestors(row, placed, TILING)[None, :]
    key = gl.arange(0, TILING.keys, gl.SliceLayout(1, layout))
    top = gl.full([lines], float("-inf"), gl.float32, along)
    mass = gl.zeros(tile_lines, gl.float32, layout)
    attended = gl.zeros(head_lines, gl.float32, layout)
    for tile in range(begin, end):
        half = 2 * (tile - begin)
        following = _slots(tile + TILING.ahead // 2 + 1, table, span, TILING)
        _arrived(TILING)  # these keys, and no warp still reads the values before them
        keys, values = _places(half, ring, TILING)
        drawn = values.permute((1, 0))
        if TILING.narrow:
            keys = keys_of(keys, k_scale, asked.dtype, TILING)
        scores = gl.zeros(tile_lines, gl.float32, layout)
        scores = warpgroup_mma(keys, asked.permute((1, 0)), scores, is_async=True)
        _fetch_behind_keys(half, ring, found, span, sides, TILING)
        if TILING.narrow:
            drawn = values_of(values, v_scale, asked.dtype, TILING)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        position = _first_key(tile, span, TILING) + key[:, None]
        scores = _seen(
            scores * scale, tile, position, row_position, ancestors, span, window, TILING
        )
        higher = gl.maximum(top, gl.ceil(gl.max(scores, 0)))
        safe = gl.where(higher == float("-inf"), 0.0, higher)
        portion = gl.exp2(scores - safe[None, :])
        fade = gl.exp2(top - safe)[None, :]
        top = higher
        mass = mass * fade + portion
        attended = attended * fade
        # they are a right operand here, which shared memory alone can be
        shares.permute((1, 0)).store(portion.to(asked.dtype))
        if TILING.crowded:
            _arrived(TILING)  # these values, too, and no warp still reads their keys
        else:
            fence_async_shared()
            meet()
        attended = warpgroup_mma(drawn, shares.permute((1, 0)), attended, is_async=True)
        _fetch_behind_values(half, ring, (found, following), span, sides, TILING)
        found = following
        attended = warpgroup_mma_wait(0, deps=(attended,))
    attended = gl.permute(attended, (1, 0))
    if TILING.narrow:
        attended = in_order(attended, TILING)
    return top, gl.sum(mass, 0), attended  # once, since warps share keys


@gluon.jit
def _ancestors(row, placed, TILING: gl.constexpr):
    """Bits of the rows that a request's rows see among its own."""
    _, ancestors, _, count = placed
    if TILING.tree:
        return gl.load(ancestors + row, mask=row < count, other=0)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return row


@gluon.jit
def _first_key(tile, span, TILING: gl.constexpr):
    """The position of a tile's first key."""
    _, _, start, _, _, skipped = span
    return gl.where(tile == 0, start, (skipped + tile - 1) * TILING.keys)


@gluon.jit
def _seen(scores, tile, position, row_position, ancestors, span, window, TILING: gl.constexpr):
    """Scores of what rows may see; minus infinity for the rest."""
    _, _, start, stop, older, _ = span
    seen = position < gl.where(tile == 0, stop, older)
    if TILING.tree:  # of their own tile's keys those of their ancestors
        # older keys, which every row sees, are too far away to be a bit among 32
        bit = gl.minimum(gl.maximum(position - start, 0), 31)
        seen = seen & ((tile > 0) | ((ancestors >> bit) & 1 == 1))
    elif TILING.causal:
        seen = seen & (position <= row_position)
    if TILING.window:
        seen = seen & (position > row_position - window)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _slots(tile, table, span, TILING: gl.constexpr):
    """Cache slots of a tile's older keys; behind the last key its slot again."""
    _, end, _, _, older, skipped = span
    key = gl.arange(0, TILING.keys, gl.SliceLayout(1, TILING.fetched))
    # a slot that nobody wrote may hold NaN, which a share of zero does not take away
    position = gl.minimum((skipped + tile - 1) * TILING.keys + key, older - 1)
    wanted = (tile > 0) & (tile < end) & (key >= 0)
    return gl.load(table + position, mask=wanted, other=0).to(gl.int32)


@gluon.jit
def _arrived(TILING: gl.constexpr):
    """Wait until the next tile, or half if crowded, is there, and no warp reads what was before."""
    # copies are counted by groups, one a half, so that `_fetch` makes one even of nothing
    async_copy.wait_group(TILING.ahead - 1 if TILING.crowded else TILING.ahead - 2)
    # products read shared memory by another path than copies and stores write it
    fence_async_shared()
    meet()


@gluon.jit
def _places(half, ring, TILING: gl.constexpr):
    """The places of a tile's keys and values."""
    return ring.index(half % TILING.places), ring.index((half + 1) % TILING.places)


@gluon.jit
def _fetch_behind_keys(half, ring, found, span, sides, TILING: gl.constexpr):
    """Ask, while a tile's keys are multiplied, for what takes the place of the values before
    them."""
    _fetch(half + TILING.ahead, TILING.ahead % 2, ring, found, span, sides, TILING)
    if not TILING.crowded:
        _fetch(half + TILING.ahead + 1, 1, ring, found, span, sides, TILING)


@gluon.jit
def _fetch_behind_values(half, ring, slots, span, sides, TILING: gl.constexpr):
    """Ask, while a tile's values are multiplied, for what takes the place of its keys.

    slots: of the tile that was just asked for, and of the next.
    """
    found, following = slots
    if TILING.crowded:
        if TILING.ahead % 2 == 0:
            _fetch(half + TILING.ahead + 1, 1, ring, found, span, sides, TILING)
        else:
            _fetch(half + TILING.ahead + 1, 0, ring, following, span, sides, TILING)


@gluon.jit
def _fetch(half, SIDE: gl.constexpr, ring, found, span, sides, TILING: gl.constexpr):
    """Ask for older keys (side 0) or values (1), if there are any. found: their slots."""
    begin, end, _, _, _, _ = span
    tile = begin + half // 2
    if (tile > 0) & (tile < end):
        of_head, side_stride = sides
        lane = gl.arange(0, TILING.stored, gl.SliceLayout(0, TILING.fetched))[None, :]
        at = of_head + (found.to(gl.int64) * (TILING.kv_heads * TILING.stored))[:, None] + lane
        async_copy.async_copy_global_to_shared(
            ring.index(half % TILING.places), at + SIDE * side_stride
        )
    async_copy.commit_group()

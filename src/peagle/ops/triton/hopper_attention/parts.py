"""How parts of a context are left where others see them, merged, and written as an output.

left: where the first part of one request and key-value head is left, as `Tiling.partial` says. The
second part of that head comes behind the first parts of all heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peagle.ops.triton.attention_parts import LOG2E


@gluon.jit
def leave(top, total, attended, left, part, TILING: gl.constexpr):
    """Leave a part."""
    sums_at, values_at = _places(left, part, TILING)
    gl.store(values_at, attended)
    gl.store(sums_at, top)
    gl.store(sums_at + TILING.lines, total)


@gluon.jit
def merged(left, active, TILING: gl.constexpr):
    """All parts as one: the highest score, the sum of shares, and what they draw."""
    layout: gl.constexpr = TILING.sums
    across: gl.constexpr = gl.SliceLayout(1, layout)
    lines: gl.constexpr = TILING.lines
    shape: gl.constexpr = [TILING.lines, TILING.size]
    top = gl.full([lines], float("-inf"), gl.float32, across)
    total = gl.zeros([lines], gl.float32, across)
    attended = gl.zeros(shape, gl.float32, layout)
    together: gl.constexpr = TILING.parts_at_once
    for few in range(0, active, together):
        for one in gl.static_range(together):
            part = few + one
            # the comparison, always true, gives a single condition the shape of lines
            there = (gl.arange(0, lines, across) >= 0) & (part < active)
            sums_at, values_at = _places(left, part, TILING)
            level = gl.load(sums_at, mask=there, other=float("-inf"), cache_modifier=".cg")
            mass = gl.load(sums_at + lines, mask=there, other=0.0, cache_modifier=".cg")
            value = gl.load(values_at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            higher = gl.maximum(top, level)
            # of a line that has seen nothing yet minus infinity less itself would be NaN
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = gl.exp2(top - safe), gl.exp2(level - safe)
            total = total * fade + mass * weight
            attended = attended * fade[:, None] + value * weight[:, None]
            top = higher
    return top, total, attended


@gluon.jit
def write(top, total, attended, sinks, out, kv_head, first, count, TILING: gl.constexpr):
    """Write what rows attended to, less what their heads' sinks take."""
    line, dim = _axes(TILING)
    row, head = line // TILING.padded, kv_head * TILING.group + line % TILING.padded
    if TILING.sinks:
        # a sink is one more score, of a key without a value
        sink = gl.load(sinks + gl.minimum(head, TILING.heads - 1)).to(gl.float32) * LOG2E
        total += gl.exp2(sink - top)
    result = attended / gl.where(total == 0.0, 1.0, total)[:, None]
    line_at = (first + row) * TILING.heads * TILING.size + head * TILING.size
    at = out + line_at[:, None] + dim[None, :]
    # heads that fill a group up to a power of two take part as rows that nobody reads
    real = ((row < count) & (line % TILING.padded < TILING.group))[:, None] & (dim >= 0)[None, :]
    gl.store(at, result.to(out.dtype.element_ty), mask=real)


@gluon.jit
def _places(left, part, TILING: gl.constexpr):
    """Where a part's highest scores lie, and what its keys gave."""
    line, dim = _axes(TILING)
    of_part = left + part * (TILING.kv_heads * TILING.partial)
    sums_at = of_part + TILING.lines * TILING.size + line
    return sums_at, of_part + (line * TILING.size)[:, None] + dim[None, :]


@gluon.jit
def _axes(TILING: gl.constexpr):
    line = gl.arange(0, TILING.lines, gl.SliceLayout(1, TILING.sums))
    return line, gl.arange(0, TILING.size, gl.SliceLayout(0, TILING.sums))

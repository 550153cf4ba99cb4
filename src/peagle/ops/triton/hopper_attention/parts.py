"""Parts of a context: left where others see them, merged, and written as a layer's output.

left: where the first part of one request and key-value head is left, as `Form.partial` says; the
next one's comes behind those of all heads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from peagle.ops.triton.attention_parts import LOG2E


@gluon.jit
def leave(top, total, attended, left, part, FORM: gl.constexpr):
    """Leave a part."""
    sums_at, values_at = _places(left, part, FORM)
    gl.store(values_at, attended)
    gl.store(sums_at, top)
    gl.store(sums_at + FORM.lines, total)


@gluon.jit
def merged(left, active, FORM: gl.constexpr):
    """All parts as one: the highest score, the sum of shares, and what they draw."""
    layout: gl.constexpr = FORM.sums
    across: gl.constexpr = gl.SliceLayout(1, layout)
    lines: gl.constexpr = FORM.lines
    shape: gl.constexpr = [FORM.lines, FORM.size]
    top = gl.full([lines], float("-inf"), gl.float32, across)
    total = gl.zeros([lines], gl.float32, across)
    attended = gl.zeros(shape, gl.float32, layout)
    together: gl.constexpr = FORM.parts_at_once
    for few in range(0, active, together):
        for one in gl.static_range(together):
            part = few + one
            there = (gl.arange(0, lines, across) >= 0) & (part < active)
            sums_at, values_at = _places(left, part, FORM)
            level = gl.load(sums_at, mask=there, other=float("-inf"), cache_modifier=".cg")
            mass = gl.load(sums_at + lines, mask=there, other=0.0, cache_modifier=".cg")
            value = gl.load(values_at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            higher = gl.maximum(top, level)
            safe = gl.where(higher == float("-inf"), 0.0, higher)
            fade, weight = gl.exp2(top - safe), gl.exp2(level - safe)
            total = total * fade + mass * weight
            attended = attended * fade[:, None] + value * weight[:, None]
            top = higher
    return top, total, attended


@gluon.jit
def write(top, total, attended, sinks, out, kv_head, first, count, FORM: gl.constexpr):
    """Write what rows attended to, less what their heads' sinks take."""
    line, dim = _axes(FORM)
    row, head = line // FORM.padded, kv_head * FORM.group + line % FORM.padded
    if FORM.sinks:
        sink = gl.load(sinks + gl.minimum(head, FORM.heads - 1)).to(gl.float32) * LOG2E
        total += gl.exp2(sink - top)
    result = attended / gl.where(total == 0.0, 1.0, total)[:, None]
    at = out + ((first + row) * FORM.heads * FORM.size + head * FORM.size)[:, None] + dim[None, :]
    # heads that fill a group up to a power of two take part as rows that nobody reads
    real = ((row < count) & (line % FORM.padded < FORM.group))[:, None] & (dim >= 0)[None, :]
    gl.store(at, result.to(out.dtype.element_ty), mask=real)


@gluon.jit
def _places(left, part, FORM: gl.constexpr):
    """Where a part's highest scores lie, and what its keys gave."""
    line, dim = _axes(FORM)
    of_part = left + part * (FORM.kv_heads * FORM.partial)
    sums_at = of_part + FORM.lines * FORM.size + line
    return sums_at, of_part + (line * FORM.size)[:, None] + dim[None, :]


@gluon.jit
def _axes(FORM: gl.constexpr):
    line = gl.arange(0, FORM.lines, gl.SliceLayout(1, FORM.sums))
    return line, gl.arange(0, FORM.size, gl.SliceLayout(0, FORM.sums))

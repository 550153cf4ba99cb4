"""What a chain's multiplying warps do: products of the panels that come, and what is behind each.

Tiles are [outputs, rows] here: the weight is the left operand.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.triton.chain.loads import tiles_taken
from peagle.ops.triton.chain.shape import HEIGHT, PANELS
from peagle.ops.triton.chain.signals import arrive, meet, wait_for

PLAIN = gl.constexpr(gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1]))
"""64 lines by rows."""
GATED = gl.constexpr(gl.BlockedLayout([2, 1, 2], [16, 2, 1], [1, 4, 1], [2, 0, 1]))
"""32 outputs by rows by gate and up."""
FOLDED = gl.constexpr(gl.BlockedLayout([1, 1, 2, 2], [32, 1, 1, 1], [1, 4, 1, 1], [2, 3, 0, 1]))
"""32 outputs by rows by a panel's halves by pieces of the input."""


@gluon.jit
def multiply_all(
    ring,
    added,
    inner,
    added_behind,
    qkv,
    arrivals,
    rows,
    post_eps,
    next_eps,
    SHAPE: gl.constexpr,
):
    """The four products. added: the stream, norm weight, and the new stream, scaled, squares."""
    out_link: gl.constexpr = SHAPE.out_link
    gate_link: gl.constexpr = SHAPE.gate_link
    down_link: gl.constexpr = SHAPE.down_link
    qkv_link: gl.constexpr = SHAPE.qkv_link
    gdc_wait()
    # attention that is launched now may read all but q, k and v, for which it waits
    gdc_launch_dependents()
    done = _add(0, ring, added, arrivals, rows, out_link, SHAPE)
    wait_for(arrivals, out_link.tiles)
    factor = _over_rms(added[4], post_eps, out_link, SHAPE)
    done = _gate(done, ring, factor, inner, rows, gate_link, SHAPE)
    arrive(arrivals + 1)
    done = _add(done, ring, added_behind, arrivals + 2, rows, down_link, SHAPE)
    if SHAPE.qkv > 0:
        wait_for(arrivals + 2, down_link.tiles)
        factor = _over_rms(added_behind[4], next_eps, down_link, SHAPE)
        _scale(done, ring, factor, qkv, rows, qkv_link, SHAPE)
    # behind q, k and v all programs have seen the counts; else the last of them comes with this one
    order: gl.constexpr = "relaxed" if SHAPE.qkv > 0 else "acq_rel"
    if gl.atomic_add(arrivals + 3, 1, sem=order) == SHAPE.programs - 1:
        for count in gl.static_range(4):
            gl.store(arrivals + count, 0)


@gluon.jit
def _multiply(done, ring, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """A tile: [lines, rows], folded [lines, 2 rows]."""
    full, free, panels, inputs, folded = ring
    width: gl.constexpr = SHAPE.rows * LINK.pieces
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    acc = gl.zeros([HEIGHT, width], gl.float32, acc_layout)
    for step in range(LINK.steps):
        slot = (done + step) % SHAPE.stages
        mbarrier.wait(full.index(slot), (done + step) // SHAPE.stages & 1)
        for panel in gl.static_range(PANELS):
            at = slot * PANELS + panel
            alone = slot * PANELS * 2 + panel
            x = folded.index(at) if LINK.pieces == 2 else inputs.index(alone)
            acc = warpgroup_mma(panels.index(at), x.permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(slot), count=1)
    return acc


@gluon.jit
def _add(done, ring, added, arrivals, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """The product and the stream before, that under the next norm, and the sum of its squares."""
    before, norm, out, scaled, squares = added
    layout: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, FOLDED))
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))
    for index in range(tiles_taken(LINK, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        column = tile * LINK.columns + gl.arange(0, LINK.columns, gl.SliceLayout(1, layout))
        inside = column < LINK.outputs
        place = row[None, :] * LINK.outputs + column[:, None]
        keep = (row < rows)[None, :] & inside[:, None]
        known = gl.load(before + place, mask=keep, other=0.0, cache_modifier=".cg")
        factor = gl.load(norm + column, mask=inside, other=0.0)
        acc = _multiply(done + index * LINK.steps, ring, LINK, SHAPE)
        total = _unfolded(acc, SHAPE)
        y = (total.to(gl.bfloat16).to(gl.float32) + known.to(gl.float32)).to(gl.bfloat16)
        gl.store(out + place, y, mask=keep)
        y = y.to(gl.float32)
        y_scaled = y * factor.to(gl.float32)[:, None]
        gl.store(scaled + place, y_scaled.to(gl.bfloat16), mask=keep)
        sums = gl.sum(gl.where(keep, y * y, 0.0), 0)
        gl.store(squares + tile * SHAPE.squares_stride + row, sums)
        arrive(arrivals)
    return done + tiles_taken(LINK, SHAPE) * LINK.steps


@gluon.jit
def _unfolded(acc, SHAPE: gl.constexpr):
    """Each half of a panel by its own piece of the input: a diagonal of quarters."""
    quarters = gl.permute(gl.reshape(acc, [2, 32, 2, SHAPE.rows]), (1, 3, 0, 2))
    left, right = gl.split(gl.convert_layout(quarters, FOLDED))
    first, _ = gl.split(left)
    _, second = gl.split(right)
    return first + second


@gluon.jit
def _over_rms(squares, eps, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """One over the root mean square of each row of a stream: [rows]."""
    meet()  # no warp still waits for a count when another goes on and it is cleared
    parts: gl.constexpr = triton.next_power_of_2(LINK.tiles)
    lanes: gl.constexpr = SHAPE.rows if SHAPE.rows < 32 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [4, 1], [1, 0])
    part = gl.arange(0, parts, gl.SliceLayout(1, layout))
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))
    there = (part < LINK.tiles)[:, None] & (row >= 0)[None, :]
    at = squares + part[:, None] * SHAPE.squares_stride + row[None, :]
    found = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    return gl.rsqrt(gl.sum(found, 0) / LINK.outputs + eps)


@gluon.jit
def _gate(done, ring, factor, inner, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """silu(gate) * up."""
    layout: gl.constexpr = gl.SliceLayout(2, GATED)
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))
    factor = gl.convert_layout(factor, gl.SliceLayout(0, layout))[None, :]
    for index in range(tiles_taken(LINK, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        acc = _multiply(done + index * LINK.steps, ring, LINK, SHAPE)
        both = gl.permute(gl.reshape(acc, [2, LINK.columns, SHAPE.rows]), (1, 2, 0))
        gate, up = gl.split(gl.convert_layout(both, GATED))
        gate = gate * factor
        y = gate / (1.0 + gl.exp(-gate)) * (up * factor)
        column = tile * LINK.columns + gl.arange(0, LINK.columns, gl.SliceLayout(1, layout))
        keep = (row < rows)[None, :] & (column < LINK.outputs)[:, None]
        place = row[None, :] * LINK.outputs + column[:, None]
        gl.store(inner + place, y.to(gl.bfloat16), mask=keep)
    return done + tiles_taken(LINK, SHAPE) * LINK.steps


@gluon.jit
def _scale(done, ring, factor, out, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """The product of what is divided by its rms."""
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, PLAIN))
    output = gl.arange(0, HEIGHT, gl.SliceLayout(1, PLAIN))
    factor = gl.convert_layout(factor, gl.SliceLayout(0, PLAIN))[None, :]
    for index in range(tiles_taken(LINK, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        acc = _multiply(done + index * LINK.steps, ring, LINK, SHAPE)
        column = tile * LINK.columns + output
        inside = (output < LINK.columns) & (column < LINK.outputs)
        keep = (row < rows)[None, :] & inside[:, None]
        y = (gl.convert_layout(acc, PLAIN) * factor).to(gl.bfloat16)
        gl.store(out + row[None, :] * LINK.outputs + column[:, None], y, mask=keep)

"""What a chain's multiplying warps do: products of the panels that arrive, and what follows each.

Tiles are [outputs, rows] here: the weight is the left operand.
"""

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.triton.gluon import meet
from peagle.ops.triton.layer_chain.loads import units_taken
from peagle.ops.triton.layer_chain.shape import HEIGHT, OWNED
from peagle.ops.triton.layer_chain.signals import arrive, wait_for

PLAIN = gl.constexpr(gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1]))
"""64 lines by rows: outputs lie side by side in memory, so 16 threads write 64 bytes in a row."""
GATED = gl.constexpr(gl.BlockedLayout([2, 1, 2], [16, 2, 1], [1, 4, 1], [2, 0, 1]))
"""32 outputs by rows by gate and up, both in one thread, so that to split them moves nothing."""
FOLDED = gl.constexpr(gl.BlockedLayout([1, 1, 2, 2], [32, 1, 1, 1], [1, 4, 1, 1], [2, 3, 0, 1]))
"""32 outputs by rows by a panel's halves by pieces of the input, all four in one thread."""


class Added(NamedTuple):
    """The stream that a product is added to, the next norm, and where the results are written."""

    stream: Tensor
    norm: Tensor
    eps: float
    out: Tensor
    """The new stream."""
    scaled: Tensor
    """The same times the norm's weight."""
    squares: Tensor


@gluon.jit
def multiply_all(ring, added, inner, behind, qkv, given, arrivals, rows, SHAPE: gl.constexpr):
    """All four products. added: of out; behind: of down."""
    out_link: gl.constexpr = SHAPE.out_link
    gate_link: gl.constexpr = SHAPE.gate_link
    down_link: gl.constexpr = SHAPE.down_link
    qkv_link: gl.constexpr = SHAPE.qkv_link
    gdc_wait()
    # attention that is launched now may read all but q, k and v, for which it waits
    gdc_launch_dependents()
    done = _add(0, ring, added, given, arrivals, rows, out_link, SHAPE)
    # an rms is of a whole row, whose parts all programs have
    wait_for(arrivals, out_link.units)
    factor = _over_rms(added, out_link, SHAPE)
    done = _gate(done, ring, factor, inner, rows, gate_link, SHAPE)
    # a program without gates arrives, too: down waits for every program
    arrive(arrivals + 1)
    done = _add(done, ring, behind, given, arrivals + 2, rows, down_link, SHAPE)
    if SHAPE.qkv > 0:
        wait_for(arrivals + 2, down_link.units)
        factor = _over_rms(behind, down_link, SHAPE)
        _scale(done, ring, factor, qkv, rows, qkv_link, SHAPE)
    # after q, k and v all programs have seen the counts; else the last of them comes with this one
    order: gl.constexpr = "relaxed" if SHAPE.qkv > 0 else "acq_rel"
    if gl.atomic_add(arrivals + 3, 1, sem=order) == SHAPE.programs - 1:
        for count in gl.static_range(4):
            gl.store(arrivals + count, 0)


@gluon.jit
def _multiply(done, ring, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """A tile of one panel a step: [lines, rows], folded [lines, 2 rows]."""
    full, free, panels, inputs, folded = ring
    width: gl.constexpr = SHAPE.rows * LINK.pieces
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    acc = gl.zeros([HEIGHT, width], gl.float32, acc_layout)
    count: gl.constexpr = LINK.panels
    for step in range(LINK.steps):
        # the same count of slots as the loading warp's: their order is all that both agree on
        slot = (done + step) % SHAPE.stages
        mbarrier.wait(full.index(slot), (done + step) // SHAPE.stages & 1)
        for panel in gl.static_range(count):
            if LINK.pieces == 2:
                x = folded.index(slot * LINK.panels + panel)
            else:
                x = inputs.index(slot * SHAPE.pieces + SHAPE.pieces - count + panel)
            at = slot * SHAPE.panels + panel
            acc = warpgroup_mma(panels.index(at), x.permute((1, 0)), acc, is_async=True)
        # only then may the loading warp write over what was read
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(free.index(slot), count=1)
    return acc


@gluon.jit
def _multiply_strips(done, ring, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """A tile of three strips, one below the other: three times [lines, rows]."""
    full, free, panels, inputs, _ = ring
    width: gl.constexpr = SHAPE.rows
    count: gl.constexpr = LINK.panels
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    first = gl.zeros([HEIGHT, width], gl.float32, acc_layout)
    second = gl.zeros([HEIGHT, width], gl.float32, acc_layout)
    third = gl.zeros([HEIGHT, width], gl.float32, acc_layout)
    for step in range(LINK.steps):
        slot = (done + step) % SHAPE.stages
        mbarrier.wait(full.index(slot), (done + step) // SHAPE.stages & 1)
        for panel in gl.static_range(count):
            x = inputs.index(slot * SHAPE.pieces + SHAPE.pieces - count + panel).permute((1, 0))
            at = slot * SHAPE.panels + panel
            first = warpgroup_mma(panels.index(at), x, first, is_async=True)
            second = warpgroup_mma(panels.index(at + count), x, second, is_async=True)
            third = warpgroup_mma(panels.index(at + 2 * count), x, third, is_async=True)
        first, second, third = warpgroup_mma_wait(0, deps=(first, second, third))
        mbarrier.arrive(free.index(slot), count=1)
    return first, second, third


@gluon.jit
def _add(done, ring, added, given, arrivals, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """Write the sum of product and stream, that times the next norm's weight, and its squares."""
    halved: gl.constexpr = LINK.kind == "halved"
    layout: gl.constexpr = gl.SliceLayout(2, GATED if halved else gl.SliceLayout(3, FOLDED))
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))
    for index in range(units_taken(LINK, SHAPE)):
        unit = gl.program_id(0) + index * SHAPE.programs
        column = unit * OWNED + gl.arange(0, OWNED, gl.SliceLayout(1, layout))
        inside = column < LINK.outputs
        place = row[None, :] * LINK.outputs + column[:, None]
        keep = (row < rows)[None, :] & inside[:, None]
        # asked for before the product, which takes longer
        known = gl.load(added.stream + place, mask=keep, other=0.0, cache_modifier=".cg")
        factor = gl.load(added.norm + column, mask=inside, other=0.0)
        acc = _multiply(done + index * LINK.steps, ring, LINK, SHAPE)
        total = _exchanged(acc, unit, given, SHAPE) if halved else _unfolded(acc, SHAPE)
        # rounded twice, as a product is that is written before the stream is added
        y = (total.to(gl.bfloat16).to(gl.float32) + known.to(gl.float32)).to(gl.bfloat16)
        gl.store(added.out + place, y, mask=keep)
        # the norm sees what is written, not what was rounded away
        y = y.to(gl.float32)
        y_scaled = y * factor.to(gl.float32)[:, None]
        gl.store(added.scaled + place, y_scaled.to(gl.bfloat16), mask=keep)
        sums = gl.sum(gl.where(keep, y * y, 0.0), 0)
        gl.store(added.squares + unit * SHAPE.squares_stride + row, sums)
        arrive(arrivals)
    return done + units_taken(LINK, SHAPE) * LINK.steps


@gluon.jit
def _unfolded(acc, SHAPE: gl.constexpr):
    """The sums of each half of a panel and its own piece of the input."""
    # 32 outputs alone would fill half of a panel, whose 64 lines a product takes anyway. So a panel
    # has two pieces of the depth, and its product with both pieces of the input has four quarters:
    #
    #                      input, piece 0   input, piece 1
    #   weight, piece 0    summed           not meant
    #   weight, piece 1    not meant        summed
    quarters = gl.permute(gl.reshape(acc, [2, 32, 2, SHAPE.rows]), (1, 3, 0, 2))
    left, right = gl.split(gl.convert_layout(quarters, FOLDED))
    first, _ = gl.split(left)
    _, second = gl.split(right)
    return first + second


@gluon.jit
def _exchanged(acc, unit, given, SHAPE: gl.constexpr):
    """The sums of the half of a tile's outputs that this program owns, over all of the depth.

    Its sums of the other half go to the program that has the rest of the depth, which gives it its
    own.
    """
    sums, gifts = given
    layout: gl.constexpr = gl.SliceLayout(2, GATED)
    upper, lower = halves(acc, GATED)
    is_upper = unit % 2 == 0
    line = gl.arange(0, OWNED, gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))[None, :]
    at = sums + row * OWNED + line
    size: gl.constexpr = OWNED * SHAPE.rows
    gl.store(at + (unit ^ 1) * size, gl.where(is_upper, lower, upper))
    meet()
    # one thread's release is for all warps, which have met
    gl.atomic_add(gifts + (unit ^ 1), 1, sem="release")
    wait_for(gifts + unit, 1)
    # past L1, which may hold what another multiprocessor has since written over
    theirs = gl.load(at + unit * size, cache_modifier=".cg")
    meet()
    # the next gift is down's, before which all programs arrive with out: this one has read by then
    gl.store(gifts + unit, 0)
    return gl.where(is_upper, upper, lower) + theirs


@gluon.jit
def halves(x, LAYOUT: gl.constexpr):
    """The upper and the lower half of lines [lines, rows]. LAYOUT: of lines by rows by half."""
    both = gl.permute(gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0))
    return gl.split(gl.convert_layout(both, LAYOUT))


@gluon.jit
def _over_rms(added, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """One over the root mean square of each row of a stream: [rows]."""
    meet()  # no warp still waits for a count when another goes on and it is cleared
    parts: gl.constexpr = triton.next_power_of_2(LINK.units)
    lanes: gl.constexpr = SHAPE.rows if SHAPE.rows < 32 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [4, 1], [1, 0])
    part = gl.arange(0, parts, gl.SliceLayout(1, layout))
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))
    there = (part < LINK.units)[:, None] & (row >= 0)[None, :]
    at = added.squares + part[:, None] * SHAPE.squares_stride + row[None, :]
    found = gl.load(at, mask=there, other=0.0, cache_modifier=".cg")
    return gl.rsqrt(gl.sum(found, 0) / LINK.outputs + added.eps)


@gluon.jit
def _gate(done, ring, factor, inner, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """Write silu(gate) * up."""
    factor = gl.convert_layout(factor, gl.SliceLayout(0, gl.SliceLayout(2, GATED)))[None, :]
    for index in range(units_taken(LINK, SHAPE)):
        first = (gl.program_id(0) + index * SHAPE.programs) * LINK.columns
        at = done + index * LINK.steps
        if LINK.strips == 3:
            upper, middle, lower = _multiply_strips(at, ring, LINK, SHAPE)
            _write_gated(upper, factor, inner, first, rows, LINK, SHAPE)
            _write_gated(middle, factor, inner, first + 32, rows, LINK, SHAPE)
            _write_gated(lower, factor, inner, first + 64, rows, LINK, SHAPE)
        else:
            acc = _multiply(at, ring, LINK, SHAPE)
            _write_gated(acc, factor, inner, first, rows, LINK, SHAPE)
    return done + units_taken(LINK, SHAPE) * LINK.steps


@gluon.jit
def _write_gated(acc, factor, inner, first, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """Write what a panel of 32 gates makes of the 32 numbers that they gate."""
    layout: gl.constexpr = gl.SliceLayout(2, GATED)
    gate, up = halves(acc, GATED)
    # rounded as products that are written before their gate is taken
    gate = (gate * factor).to(gl.bfloat16).to(gl.float32)
    up = (up * factor).to(gl.bfloat16).to(gl.float32)
    y = gate / (1.0 + gl.exp(-gate)) * up
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, layout))
    column = first + gl.arange(0, 32, gl.SliceLayout(1, layout))
    keep = (row < rows)[None, :] & (column < LINK.outputs)[:, None]
    place = row[None, :] * LINK.outputs + column[:, None]
    gl.store(inner + place, y.to(gl.bfloat16), mask=keep)


@gluon.jit
def _scale(done, ring, factor, out, rows, LINK: gl.constexpr, SHAPE: gl.constexpr):
    """Write the product of a stream that is divided by its rms."""
    row = gl.arange(0, SHAPE.rows, gl.SliceLayout(0, PLAIN))
    output = gl.arange(0, HEIGHT, gl.SliceLayout(1, PLAIN))
    factor = gl.convert_layout(factor, gl.SliceLayout(0, PLAIN))[None, :]
    for index in range(units_taken(LINK, SHAPE)):
        tile = gl.program_id(0) + index * SHAPE.programs
        acc = _multiply(done + index * LINK.steps, ring, LINK, SHAPE)
        column = tile * LINK.columns + output
        inside = (output < LINK.columns) & (column < LINK.outputs)
        keep = (row < rows)[None, :] & inside[:, None]
        y = (gl.convert_layout(acc, PLAIN) * factor).to(gl.bfloat16)
        gl.store(out + row[None, :] * LINK.outputs + column[:, None], y, mask=keep)

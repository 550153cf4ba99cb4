"""Products of weights of four bits with so few rows that memory alone should bound them.

A program has eight warps, all alike, and two programs share a multiprocessor. Words and rows come
through a ring in shared memory: what comes by registers waits for its product in each thread, and
what comes by L1 takes shared memory from the kernels around, for which multiprocessors stop.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.triton.gluon import (
    e2m1_of,
    integers_of,
    less_of,
    meet,
    of_quad,
    pairs_of_scales,
    two_of,
)
from peagle.ops.triton.hopper_product.launches import launched
from peagle.ops.triton.hopper_product.shape import FewShape, covers
from peagle.ops.triton.hopper_product.sums import (
    first_unit,
    lines_of,
    multiply_tiles,
    of_lines,
    of_quarters,
    operand,
)
from peagle.ops.triton.launch import multiprocessors
from peagle.ops.triton.product_call import ProductCall
from peagle.ops.triton.weights import Packing, operands
from peagle.ops.weight import NVFP4, QuantizedWeight

ROWS = 8
STEP, STAGES = gl.constexpr(256), gl.constexpr(3)
"""Inputs of a step, and steps that the ring has room for."""
RESIDENT = 2
"""Programs of a multiprocessor: as many as its shared memory has room for."""
STEPS = 2
"""Least steps of a program."""


def takes(call: ProductCall, weight: QuantizedWeight) -> bool:
    """Whether the kernel covers a call, and all programs have enough to do."""
    if len(call.x) > ROWS or weight.format.bits != 4 or not covers(call.x, weight):
        return False
    lines, depth = weight.shape
    steps = triton.cdiv(lines, FewShape.lines) * triton.cdiv(depth, STEP.value)
    return steps >= STEPS * RESIDENT * multiprocessors(call.x)


def launch(call: ProductCall, weight: QuantizedWeight) -> Tensor:
    """Fill a call's results, of which the first is returned."""
    shape, tiles = divided(call, weight)
    given = operands(weight)
    if weight.format == NVFP4:
        given = given._replace(scales=given.scales.view(torch.int32))
    return launched(_product, call, shape, tiles, call.x, given)


def divided(call: ProductCall, weight: QuantizedWeight) -> tuple[FewShape, int]:
    """How a call is divided, and its tiles."""
    packing, form = Packing.of(weight, STEP.value), call.form(1)
    tiles = triton.cdiv(call.out.shape[1], FewShape.lines // (1 + form.gated))
    steps = tiles * triton.cdiv(call.x.shape[1], STEP.value)
    programs = min(RESIDENT * multiprocessors(call.x), steps)
    return FewShape(packing, form, ROWS, STAGES.value, programs), tiles


@gluon.jit(do_not_specialize=["rows"])
def _product(x, weight, squares, bias, results, rows, sizes, P: gl.constexpr):
    words = gl.allocate_shared_memory(gl.int16, [P.stages, P.lines, P.words], P.packed)
    inputs = gl.allocate_shared_memory(gl.bfloat16, [P.stages, P.rows, STEP], P.packed)
    ring = (words, inputs, x)
    of_tile = (sizes.depth + STEP - 1) // STEP
    units = (sizes.outputs + P.columns - 1) // P.columns * of_tile
    program, work = gl.program_id(0), (1, of_tile, units)
    first, last = first_unit(program, units, P), first_unit(program + 1, units, P)
    given = (weight, squares, bias, results, rows, sizes)
    ahead: gl.constexpr = P.stages - 1
    # a weight is nobody's result: what is copied of it does not wait for the launch before
    for unit in range(first, gl.minimum(first + ahead, last)):
        from_line = _words_at(unit // of_tile, sizes, P)
        _copy_words(unit - first, unit % of_tile, from_line, ring, weight, sizes, P)
    gdc_wait()
    gdc_launch_dependents()
    for place in gl.static_range(ahead):
        if first + place < last:
            _copy_inputs(place, (first + place) % of_tile, ring, rows, sizes, P)
        async_copy.commit_group()
    multiply_tiles(_sums, 0, ring, given, (first, last), work, P)


@gluon.jit
def _words_at(tile, sizes, P: gl.constexpr):
    """The first words of a tile's lines, as threads copy them."""
    place = gl.arange(0, P.lines, gl.SliceLayout(1, P.copied))
    return lines_of(tile * P.columns, place, sizes.outputs, P) * _width(sizes, P)


@gluon.jit
def _width(sizes, P: gl.constexpr):
    """Words of a line: those of whole runs."""
    return (sizes.depth + P.packing.run - 1) // P.packing.run * (P.packing.run // 4)


@gluon.jit
def _copy_words(place, step, from_line, ring, weight, sizes, P: gl.constexpr):
    """Ask for a step's words, the next in the ring."""
    words, _, _ = ring
    word = gl.arange(0, P.words, gl.SliceLayout(0, P.copied))
    at = (weight.numbers + step * P.words + word)[None, :] + from_line[:, None]
    there = (word < _width(sizes, P) - step * P.words)[None, :]
    async_copy.async_copy_global_to_shared(words.index(place % P.stages), at, mask=there)


@gluon.jit
def _copy_inputs(place, step, ring, rows, sizes, P: gl.constexpr):
    """Ask for a step's inputs; past the last one, and past the last row, there are zeros."""
    _, inputs, x = ring
    row = gl.arange(0, P.rows, gl.SliceLayout(1, P.copied_inputs))
    place_in_step = gl.arange(0, STEP, gl.SliceLayout(0, P.copied_inputs))
    at = x + step * STEP + (row[:, None] * sizes.depth + place_in_step[None, :])
    there = (place_in_step < sizes.depth - step * STEP)[None, :] & (row < rows)[:, None]
    async_copy.async_copy_global_to_shared(inputs.index(place % P.stages), at, mask=there)


@gluon.jit
def _sums(unit, count, line, GROUP: gl.constexpr, ring, given, share, work, P: gl.constexpr):
    """A tile's lines times rows, over some steps: [lines, rows]."""
    words, inputs, _ = ring
    weight, _, _, _, rows, sizes = given
    _, of_tile, _ = work
    first, last = share
    total = gl.full([P.lines, P.rows], 0.0, gl.float32, P.sums)
    start = unit % of_tile
    # what is copied is so far ahead that it may be of the next tiles
    ahead: gl.constexpr = P.stages - 1
    tile, next_step = (unit + ahead) // of_tile, (unit + ahead) % of_tile
    from_line = _words_at(tile, sizes, P)
    known = _ready(_known(weight, line, start, P), P)
    for step in range(count):
        place = unit - first + step
        # a step ahead, since it comes past the ring
        coming = _known(weight, line, gl.minimum(start + step + 1, of_tile - 1), P)
        async_copy.wait_group(ahead - 1)
        # all have waited for their copies, and nobody reads the step before, which makes room
        meet()
        if unit + step + ahead < last:
            _copy_words(place + ahead, next_step, from_line, ring, weight, sizes, P)
            _copy_inputs(place + ahead, next_step, ring, rows, sizes, P)
        # counted even if it is of nothing
        async_copy.commit_group()
        next_step += 1
        if next_step == of_tile:
            tile, next_step = tile + 1, 0
            from_line = _words_at(tile, sizes, P)
        slot = place % P.stages
        total = _added(total, words.index(slot), inputs.index(slot), known, P)
        known = _ready(coming, P)
    # as `widening.unshifted`
    return total * 2.0**63 if P.packing.kind == "nvfp4" else total


@gluon.jit
def _known(weight, line, step, P: gl.constexpr):
    """What the numbers of a step's runs share, [lines, runs]: scales, or words of four, and zero
    points, which are anything if there are none."""
    count: gl.constexpr = P.runs
    run = step * count + gl.arange(0, count, gl.SliceLayout(0, P.shared))
    column = run * P.packing.run // P.packing.wide if P.packing.wide > P.packing.run else run
    lines = gl.convert_layout(line, gl.SliceLayout(1, P.shared))
    at = lines[:, None] * P.shared_columns + column[None, :]
    # the last step may have fewer runs
    there = (column < P.shared_columns)[None, :]
    scales = gl.load(weight.scales + at, mask=there, other=0)
    zeros = gl.load(weight.zeros + at, mask=there, other=0) if P.packing.zeros else scales
    return scales, zeros


@gluon.jit
def _ready(known, P: gl.constexpr):
    """What runs share as products take it: scales, and what is added to 128 and a code."""
    scales, zeros = known
    # without zero points the middle of the codes stands for 0
    less = gl.full([P.lines, P.runs], -128.0 - 8.0, gl.bfloat16, P.shared)
    if P.packing.zeros:
        less = less_of(zeros)
    return scales, less


@gluon.jit
def _added(total, words, inputs, known, P: gl.constexpr):
    """Sums with those of a step."""
    if P.packing.kind == "nvfp4":
        return _added_e2m1(total, words, inputs, known[0], P)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return _added_integers(total, words, inputs, known, P)


@gluon.jit
def _added_integers(total, words, inputs, known, P: gl.constexpr):
    # of its two runs
    scales, less = gl.split(known[0]), gl.split(known[1])
    for run in gl.static_range(2):
        codes, rows = _of_run(words, inputs, run, P)
        numbers = integers_of(codes, of_lines(less[run], P))
        nothing = gl.full([P.lines, P.rows], 0.0, gl.float32, P.sums)
        own = mma_v2(of_quarters(numbers, P), rows, nothing)
        # a scale multiplies sums of one group, not numbers
        scale = gl.convert_layout(scales[run].to(gl.float32), gl.SliceLayout(1, P.sums))
        total += own * scale[:, None]
    return total


@gluon.jit
def _added_e2m1(total, words, inputs, scales, P: gl.constexpr):
    # each thread widens the scales of one run, for the four that have numbers of its lines
    lower, upper = pairs_of_scales(scales)
    for run in gl.static_range(4):
        codes, rows = _of_run(words, inputs, run, P)
        one, two = two_of(_beside_words(lower, run, P))
        three, four = two_of(_beside_words(upper, run, P))
        numbers = e2m1_of(codes, one, two, three, four)
        total = mma_v2(of_quarters(numbers, P), rows, total)
    return total


@gluon.jit
def _of_run(words, inputs, RUN: gl.constexpr, P: gl.constexpr):
    """A run's words, [lines, words], and inputs, [inputs, rows], as products take them."""
    width: gl.constexpr = P.packing.run
    codes = words.slice(RUN * (width // 4), width // 4, dim=1).load(P.numbers)
    return codes, inputs.slice(RUN * width, width, dim=1).permute((1, 0)).load(P.inputs)


@gluon.jit
def _beside_words(known, RUN: gl.constexpr, P: gl.constexpr):
    """What lines have for a run, for each of its words: [lines, words]."""
    found = of_quad(known, RUN)[:, None, :][:, :, :, None]
    return operand(gl.reshape(found.broadcast_to(P.lines, 2, 4, 2), [P.lines, 16]), P)

"""What a group of warps does: widen its lines' numbers, multiply them, add up and write tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from peagle.ops.triton.gluon import (
    appended,
    bfloat16_of,
    bytes_of,
    e2m1_of,
    integers_of,
    meet,
    scales_of,
)
from peagle.ops.triton.hopper_product.shape import GROUPS, LINES, PANEL, STEP
from peagle.ops.triton.layer_chain.products import halves

LANES, WARPS = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
SCALES = gl.constexpr(
    gl.DistributedLinearLayout([[0, 1], [0, 2], [8, 0]], LANES, WARPS, [], [64, 4])
)
"""Four scales of each line that a thread multiplies numbers of."""


@gluon.jit
def multiply_all(GROUP: gl.constexpr, ring, given, share, work, P: gl.constexpr):
    """Multiply a group's lines of all tiles that a program has steps of."""
    gdc_wait()
    gdc_launch_dependents()
    multiply_tiles(_sums, GROUP, ring, given, share, work, P)


@gluon.jit
def multiply_tiles(
    SUMS: gl.constexpr, GROUP: gl.constexpr, ring, given, share, work, P: gl.constexpr
):
    """As above, by a function for the sums of some steps of a tile."""
    _, _, _, results, _, sizes = given
    across, of_tile, _ = work
    unit, last = share
    place = gl.arange(0, P.lines, gl.SliceLayout(1, P.sums))
    while unit < last:
        tile = unit // of_tile
        count = gl.minimum(of_tile - unit % of_tile, last - unit)
        column = (tile // across * P.groups + GROUP) * P.columns
        line = lines_of(column, place, sizes.outputs, P)
        total = SUMS(unit, count, line, GROUP, ring, given, share, work, P)
        whole, total = _gathered(total, tile, results, work, GROUP, P)
        if whole:
            _finish(total, line, column, tile % across * P.rows, given, P)
        unit = unit + count


@gluon.jit
def lines_of(column, place, outputs, P: gl.constexpr):
    """The weight's lines at places of a tile from an output on; past the last one that again."""
    return gl.minimum(column + place % P.columns, outputs - 1) + place // P.columns * outputs


@gluon.jit
def first_unit(program, units, P: gl.constexpr):
    """The first of a program's units of work."""
    return program * units // P.programs


@gluon.jit
def _gathered(total, tile, results, work, GROUP: gl.constexpr, P: gl.constexpr):
    """Whether all of a tile's programs have left their sums, with this one's, and all sums."""
    _, of_tile, units = work
    begin = tile * of_tile
    before = ((begin + 1) * P.programs - 1) // units
    behind = ((begin + of_tile) * P.programs - 1) // units
    whole = before == behind
    if not whole:
        gl.store(_left_at(gl.program_id(0), begin, results, units, GROUP, P), total)
        # all warps have stored before one thread counts for them
        meet()
        arrivals = results.arrivals + tile * P.groups + GROUP
        whole = gl.atomic_add(arrivals, 1, sem="acq_rel") == behind - before
        if whole:
            gl.store(arrivals, 0)
            total = gl.full([P.lines, P.rows], 0.0, gl.float32, P.sums)
            # in one order, whichever program came last; several are asked for at once
            at_once: gl.constexpr = P.gathered
            for first in range(before, behind + 1, at_once):
                for ahead in gl.static_range(at_once):
                    theirs = _left_at(first + ahead, begin, results, units, GROUP, P)
                    known = (first + ahead <= behind, 0.0) if at_once > 1 else (None, None)
                    # past L1, which does not see what other multiprocessors write
                    total += gl.load(theirs, *known, cache_modifier=".cg")
    return whole, total


@gluon.jit
def _left_at(program, begin, results, units, GROUP: gl.constexpr, P: gl.constexpr):
    """Where a program leaves its sums of the tile that begins with a unit."""
    line = gl.arange(0, P.lines, gl.SliceLayout(1, P.sums))[:, None]
    row = gl.arange(0, P.rows, gl.SliceLayout(0, P.sums))[None, :]
    # of its first tile, or of its last one
    later = (first_unit(program, units, P) < begin).to(gl.int32)
    at = ((program * 2 + later) * P.groups + GROUP) * P.lines + line
    return results.partial + at * P.rows + row


@gluon.jit
def _sums(unit, count, line, GROUP: gl.constexpr, ring, given, share, work, P: gl.constexpr):
    """A group's lines times rows, over some steps: [lines, rows]."""
    full, free, numbers, inputs = ring
    weight, _, _, _, _, sizes = given
    _, of_tile, _ = work
    done, start, depth = unit - share[0], unit % of_tile, sizes.depth
    of_groups: gl.constexpr = [P.stages * GROUPS, LINES, P.words]
    by_lines = numbers._reinterpret(gl.int16, of_groups, P.packed)
    of_panels: gl.constexpr = [P.stages * 2, P.rows, PANEL]
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    panels = inputs._reinterpret(gl.bfloat16, of_panels, plain)
    nothing = gl.full([LINES, P.rows], 0.0, gl.float32, P.sums)
    total = nothing
    coming = _shared(weight, line, start * STEP, P)
    for step in range(count):
        slot = (done + step) % P.stages
        known, at = coming, (start + step) * STEP
        # a step ahead: unlike the rest it is not copied beforehand
        coming = _shared(weight, line, gl.minimum(at + STEP, depth - 1), P)
        mbarrier.wait(full.index(slot), (done + step) // P.stages & 1)
        left, right = _widened(by_lines.index(slot * GROUPS + GROUP), known, P)
        own = total if P.packing.kind == "nvfp4" else nothing
        first, second = panels.index(slot * 2), panels.index(slot * 2 + 1)
        own = warpgroup_mma(left, first.permute((1, 0)), own, is_async=True)
        own = warpgroup_mma(right, second.permute((1, 0)), own, is_async=True)
        own = warpgroup_mma_wait(0, deps=(own,))
        total = own if P.packing.kind == "nvfp4" else total + own * known[0][:, None]
        mbarrier.arrive(free.index(slot), count=1)
    # as `widening.unshifted`
    return total * 2.0**63 if P.packing.kind == "nvfp4" else total


@gluon.jit
def _shared(weight, line, at, P: gl.constexpr):
    """What numbers of lines share from an input on, over a step: scales, and what is added to 128
    and a code."""
    if P.packing.kind == "nvfp4":
        of_line = gl.convert_layout(line, gl.SliceLayout(1, SCALES))
        block = at // STEP * (STEP // P.packing.wide) + gl.arange(0, 4, gl.SliceLayout(0, SCALES))
        found = weight.scales + of_line[:, None] * P.packing.columns + block[None, :]
        return gl.load(found), gl.load(found + 4)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        found = line // P.packing.high * P.packing.columns + at // P.packing.wide
        scales = gl.load(weight.scales + found).to(gl.float32)
        # without zero points the middle of the codes stands for 0
        less = gl.full([P.lines], -128.0 - 8.0, gl.bfloat16, gl.SliceLayout(1, P.sums))
        if P.packing.zeros:
            less = (-128.0 - gl.load(weight.zeros + found).to(gl.float32)).to(gl.bfloat16)
        return scales, less


@gluon.jit
def _widened(found, known, P: gl.constexpr):
    """The halves of a step's numbers, as products take them: twice [lines, STEP / 2]."""
    if P.packing.kind == "nvfp4":
        return _of_run(found, known[0], 0, P), _of_run(found, known[1], 1, P)
    else:  # noqa: RET505 (as above)
        codes = found.load(P.numbers)
        if P.packing.kind == "int4":
            one, two, three, four = integers_of(codes, of_lines(known[1], P))
            lower, upper = appended(one, two), appended(three, four)
        else:
            lower, upper = bytes_of(codes) if P.packing.kind == "int8" else bfloat16_of(codes)
        return operand(lower, P), operand(upper, P)


@gluon.jit
def _of_run(found, scales, RUN: gl.constexpr, P: gl.constexpr):
    """E2M1 numbers of one run times their scales: [lines, STEP / 2]."""
    codes = found.slice(RUN * 16, 16, dim=1).load(P.numbers)
    even, odd = gl.split(gl.reshape(scales_of(scales), [LINES, 2, 2]))
    one, three = gl.split(even)
    two, four = gl.split(odd)
    numbers = e2m1_of(
        codes, of_lines(one, P), of_lines(two, P), of_lines(three, P), of_lines(four, P)
    )
    return of_quarters(numbers, P)


@gluon.jit
def operand(x, P: gl.constexpr):
    """The same numbers: each thread has those that it multiplies already."""
    return gl.convert_layout(x, P.numbers, assert_trivial=True)


@gluon.jit
def of_lines(x, P: gl.constexpr):
    """What each line has, beside its numbers: [lines, 1]."""
    return gl.convert_layout(x, gl.SliceLayout(1, P.numbers))[:, None]


@gluon.jit
def of_quarters(numbers, P: gl.constexpr):
    """Four times the numbers of a quarter of a run as an operand: [lines, run]."""
    one, two, three, four = numbers
    return operand(appended(appended(one, two), appended(three, four)), P)


@gluon.jit
def _finish(total, line, column, first_row, given, P: gl.constexpr):
    """Write a group's sums of a tile, with what follows them."""
    weight, squares, bias, results, rows, sizes = given
    if P.packing.divided:
        total = total / gl.load(weight.factors + line)[:, None]
    elif P.packing.factors:
        total = total * gl.load(weight.factors + line)[:, None]
    if squares is not None:
        total = total * _over_rms(squares, first_row, rows, sizes, P)[None, :]
    if bias is not None:
        total += gl.load(bias + line).to(gl.float32)[:, None]
    # rounded as a product is that is written before its gate is taken, or added to a stream
    kind: gl.constexpr = results.out.dtype.element_ty
    apart: gl.constexpr = P.gated
    layout: gl.constexpr = gl.SliceLayout(2, apart) if P.form.gated else P.plain
    if P.form.gated:
        gate, up = halves(total.to(kind), apart)
        gate = gate.to(gl.float32)
        slope = gate
        if P.form.gelu:  # as in `triton.swiglu.gated`
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + gl.exp(-slope)) * up.to(gl.float32)
    else:
        y = gl.convert_layout(total.to(kind), P.plain).to(gl.float32)
    output = column + gl.arange(0, P.columns, gl.SliceLayout(1, layout))
    of_rows = gl.arange(0, P.rows, gl.SliceLayout(0, layout))
    row, inside = first_row + of_rows, output < sizes.outputs
    keep = (row < rows)[None, :] & inside[:, None]
    place = row.to(gl.int64)[None, :] * sizes.outputs + output[:, None]
    if P.form.adds:
        y += gl.load(results.stream + place, mask=keep, other=0.0).to(gl.float32)
    gl.store(results.out + place, y.to(kind), mask=keep)
    if P.form.adds:
        # the norm sees what is written, not what was rounded away
        y = gl.where(keep, y.to(kind).to(gl.float32), 0.0)
        factor = gl.load(results.norm + output, mask=inside, other=0.0).to(gl.float32)
        gl.store(results.scaled + place, (y * factor[:, None]).to(kind), mask=keep)
        _write_squares(gl.sum(y * y, 0), column, results, sizes, P)


@gluon.jit
def _write_squares(own, column, results, sizes, P: gl.constexpr):
    """Write sums of squares of a tile's outputs, as the first of the parts that it has."""
    count: gl.constexpr = P.lines // LINES
    part = gl.arange(0, count, gl.SliceLayout(1, P.plain))
    row = gl.arange(0, P.rows, gl.SliceLayout(0, P.plain))
    # the last tile may have outputs for fewer than all parts, and for fewer than all groups
    there = (column + part * LINES < sizes.outputs)[:, None] & (row >= 0)[None, :]
    at = results.squares + (column // LINES + part)[:, None] * P.held + row[None, :]
    own = gl.where((part == 0)[:, None], own[None, :], 0.0)
    gl.store(at, own, mask=there)
    if P.held > P.rows:
        gl.store(at + P.rows, 0.0, mask=there)


@gluon.jit
def _over_rms(squares, first_row, rows, sizes, P: gl.constexpr):
    """One over the root mean square of each row: [rows]."""
    lanes: gl.constexpr = 32 if P.rows > 32 else P.rows
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // lanes, lanes], [P.warps, 1], [1, 0])
    part = gl.arange(0, P.parts, gl.SliceLayout(1, layout))[:, None]
    row = first_row + gl.arange(0, P.rows, gl.SliceLayout(0, layout))[None, :]
    found = gl.full([P.parts, P.rows], 0.0, gl.float32, layout)
    for first in range(0, sizes.parts, P.parts):
        there = (first + part < sizes.parts) & (row < rows)
        found += gl.load(squares + (first + part) * sizes.held + row, mask=there, other=0.0)
    over = gl.rsqrt(gl.sum(found, 0) / sizes.depth + sizes.eps)
    return gl.convert_layout(over, gl.SliceLayout(0, P.sums))

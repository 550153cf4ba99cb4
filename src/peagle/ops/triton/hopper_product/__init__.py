"""Hopper's products of packed weights with more rows than fill the smallest tile.

Every program reads all rows for its lines of the weight, and numbers of few bits are so little to
read that L2 would give rows for longer than memory gives the weight. So three groups of four warps
share each step's rows, and have 64 lines of the weight each; a warp copies for all. While one group
waits for its product the others widen numbers in registers.

Programs have equal shares of all steps of all tiles, one after the other: a tile's last program
adds the sums of all that had steps of it, in their order.

    program       0               1               2
    steps of   │ tile 0 ... │ tile 0, tile 1 │ tile 1, tile 2 │ ...

Products of at most eight rows with weights of four bits are divided alike; `few` has what their
programs do.
"""

from dataclasses import replace

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from peagle.ops.triton.gluon import ring_barriers
from peagle.ops.triton.hopper_product import few
from peagle.ops.triton.hopper_product.copies import copy_all
from peagle.ops.triton.hopper_product.launches import launched
from peagle.ops.triton.hopper_product.shape import BOX, GROUPS, PANEL, STEP, ProductShape, covers
from peagle.ops.triton.hopper_product.sums import first_unit, multiply_all
from peagle.ops.triton.launch import multiprocessors
from peagle.ops.triton.product_call import ProductCall
from peagle.ops.triton.tiles import padded
from peagle.ops.triton.weights import Packing, operands
from peagle.ops.weight import NVFP4, QuantizedWeight

MOST_ROWS = 64
"""Rows of a tile; of E2M1, whose sums are not scaled, twice as many."""
FEW_ROWS, STEPS_OF_FEW, LEAST_STEPS = 32, 40, {4: 13, 8: 27}
"""Steps from which on a program beats smaller ones, by a number's bits; for so few rows, more."""
ROOM = 176 << 10
"""Bytes of shared memory for the ring."""
GROUP_REGISTERS, COPIER_REGISTERS = gl.constexpr(152), gl.constexpr(40)
"""Registers of a thread that multiplies, and of one of the warp that copies."""


def takes(call: ProductCall) -> bool:
    """Whether the kernel covers a call, and has enough to do to beat smaller programs."""
    rows, weight = len(call.x), call.weight
    if isinstance(weight, Tensor) or call.fixed:
        return False
    # first of all what nearly every call of a cycle is: rows that fill no more than a small tile
    if padded(rows) == padded(1):
        return few.takes(call, weight)
    if not covers(call.x, weight):
        return False
    if rows > MOST_ROWS and weight.format.bits == 8:
        return False  # a smaller program widens a number once for 128 rows
    shape, tiles = divided(call, weight)
    steps = tiles * triton.cdiv(weight.shape[1], STEP.value) // shape.programs
    least = LEAST_STEPS[weight.format.bits] if rows > FEW_ROWS else STEPS_OF_FEW
    return steps >= least


def launch(call: ProductCall) -> Tensor:
    """Fill a call's results, of which the first is returned."""
    weight = call.weight
    assert isinstance(weight, QuantizedWeight)
    if len(call.x) <= few.ROWS:
        return few.launch(call, weight)
    shape, tiles = divided(call, weight)
    given = operands(weight)
    lines = list(given.numbers.shape), list(given.numbers.stride())
    boxes = TensorDescriptor(given.numbers, *lines, [BOX.value, shape.words], shape.packed)
    panels = _panels(call.x, shape.rows)
    return launched(_product, call, shape, tiles, boxes, panels, given)


def divided(call: ProductCall, weight: QuantizedWeight) -> tuple[ProductShape, int]:
    """How a call is divided, and its tiles."""
    rows, depth = call.x.shape
    shape = ProductShape(
        packing=Packing.of(weight, STEP.value),
        form=call.form(1),
        rows=min(padded(rows), MOST_ROWS * (1 + (weight.format == NVFP4))),
        stages=0,
        programs=0,
    )
    columns = GROUPS.value * shape.columns
    tiles = triton.cdiv(rows, shape.rows) * triton.cdiv(call.out.shape[1], columns)
    programs = min(multiprocessors(call.x), tiles * triton.cdiv(depth, STEP.value))
    return replace(shape, stages=ROOM // shape.slot, programs=programs), tiles


def _panels(x: Tensor, height: int) -> TensorDescriptor:
    """How two panels of rows are copied; outside of x there are zeros."""
    rows, depth = x.shape
    shape, strides = [depth // PANEL.value, rows, PANEL.value], [PANEL.value, depth, 1]
    layout = gl.NVMMASharedLayout(128, 16, rank=3)
    return TensorDescriptor(x, shape, strides, [2, height, PANEL.value], layout)


@gluon.jit(do_not_specialize=["rows"])
def _product(boxes, panels, weight, squares, bias, results, rows, sizes, P: gl.constexpr):
    of_numbers: gl.constexpr = [P.stages * P.boxes, BOX, P.words]
    numbers = gl.allocate_shared_memory(gl.int16, of_numbers, P.packed)
    of_inputs: gl.constexpr = [P.stages, 2, P.rows, PANEL]
    plain: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=3)
    inputs = gl.allocate_shared_memory(gl.bfloat16, of_inputs, plain)
    full, free = ring_barriers(P.stages, GROUPS)
    ring = (full, free, numbers, inputs)
    across, of_tile = (rows + P.rows - 1) // P.rows, (sizes.depth + STEP - 1) // STEP
    columns: gl.constexpr = GROUPS * P.columns
    units = (sizes.outputs + columns - 1) // columns * across * of_tile
    program, work = gl.program_id(0), (across, of_tile, units)
    share = (first_unit(program, units, P), first_unit(program + 1, units, P))
    given = (weight, squares, bias, results, rows, sizes)
    gl.warp_specialize(
        [
            (multiply_all, (0, ring, given, share, work, P)),
            (multiply_all, (1, ring, given, share, work, P)),
            (multiply_all, (2, ring, given, share, work, P)),
            (copy_all, (ring, boxes, panels, sizes.outputs, share, work, P)),
        ],
        [4, 4, 1],
        [GROUP_REGISTERS, GROUP_REGISTERS, COPIER_REGISTERS],
    )

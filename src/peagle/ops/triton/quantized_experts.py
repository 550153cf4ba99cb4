"""Grouped products of experts whose weights are packed, inputs in 16 bits.

Pairs and blocks are as in `moe`, and so are the launches. As in `quantized_product` the weight is
the left operand: a tile is [lines, pairs], where lines of a gate and of what it gates alternate.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton import quantized_product
from peagle.ops.triton.expert_blocks import ExpertSizes, Gates, Routing, block_of, launch
from peagle.ops.triton.launch import announce, overlap, wait
from peagle.ops.triton.packed_sums import (
    Operands,
    Packing,
    factored,
    first_inputs,
    operands,
    sums,
    words,
)
from peagle.ops.triton.quantized_product import (
    gate_lines,
    halves,
    room_of,
    stages_that_fit,
    step_of,
)
from peagle.ops.triton.swiglu import clamped_swiglu, gated
from peagle.ops.weight import QuantizedWeight, Weight


@dataclass(frozen=True)
class MatrixSplit:
    """How a matrix is divided among programs."""

    lines: int
    """Lines of the weight that a program has."""
    depth: int
    """Inputs that it reads in a step."""
    stages: int
    """Steps on their way from memory, and the one that is multiplied; at most, see `stages_for`."""


FEW_PAIRS = 32
"""Most pairs in a block whose weights take longer to read than to multiply."""
LARGEST_BLOCK = 64
"""Most pairs in any block: the sums of more outgrow four warps' registers; eight are slower."""
EIGHT_BITS = MatrixSplit(64, 128, 4), MatrixSplit(128, 128, 4)
FP4 = MatrixSplit(64, 256, 4), MatrixSplit(128, 128, 4)
TILINGS = {"fp8": EIGHT_BITS, "int8": EIGHT_BITS, "mxfp4": FP4, "nvfp4": FP4, "int4": EIGHT_BITS}
"""By format, where pairs are few and where they are many: for FP8 and MXFP4 the fastest on an
H100, for others those of their like."""


def takes(weight: Weight) -> bool:
    """Whether these kernels cover a packed weight on its device."""
    return isinstance(weight, QuantizedWeight) and quantized_product.takes(weight, weight.device)


def gate_up(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    routing: Routing,
    gates: Gates,
    out: Tensor,
) -> None:
    """Fill out [pairs, inner] in the order of `routing` with every pair's gated product.

    x: [rows, depth].
    """
    _launch(_gate_up_kernel, x, weight, bias, routing.scales, routing, out, G=gates)


def down(x: Tensor, weight: Weight, bias: Tensor | None, routing: Routing, out: Tensor) -> None:
    """Fill out [pairs, hidden] with x [places, depth] times the weight, weighed by the router."""
    _launch(_down_kernel, x, weight, bias, routing.weights, routing, out, **overlap(x))


def _launch(
    kernel: Any,
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    by_row: Tensor | None,
    routing: Routing,
    out: Tensor,
    **form: Any,
) -> None:
    assert isinstance(weight, QuantizedWeight)
    (lines, depth), block = weight.shape[1:], routing.block
    tiling = TILINGS[weight.format.name][block > FEW_PAIRS]
    step = step_of(weight, tiling.depth)
    sizes = ExpertSizes(out.shape[1], depth, bias is not None, block, tiling.lines, step)
    form |= {"W": Packing.of(weight), "num_warps": 4}
    form["num_stages"] = stages_for(tiling, weight.format.bits, block, x)
    launch(kernel, sizes, lines, x, operands(weight), bias, by_row, routing, out, **form)


def stages_for(tiling: MatrixSplit, bits: int, pairs: int, x: Tensor) -> int:
    """The stages of a tiling for which a program has room beside so many pairs of rows like x.

    bits: of a number of the weight.
    """
    numbers = tiling.lines * tiling.depth
    of_weight = numbers if bits == 8 else numbers // 2 + numbers // 32  # with their scales
    step_bytes = of_weight + tiling.depth * pairs * x.element_size()
    return stages_that_fit(tiling.stages, step_bytes, room_of(x, numbers))


@triton.jit
def _gate_up_kernel(
    x,
    weight,
    bias,
    out,
    by_row,
    layout,
    E: tl.constexpr,
    G: tl.constexpr,
    W: tl.constexpr,
):
    """As `moe._gate_up_kernel`; a plain launch: after it, everything launched before is done."""
    blocks_there = tl.load(layout.num_blocks)
    expert, place, real = block_of(layout.blocks, tl.program_id(1), E.pairs)
    if tl.program_id(1) >= blocks_there:
        return
    row = tl.load(layout.order + place) // G.top_k
    line = gate_lines(tl.program_id(0), E.columns, E.lines)
    own = expert * (2 * E.columns)
    numbers = weight.numbers + own * words(E.depth, W)
    blocks_at = expert * ((2 * E.columns + W.high - 1) // W.high * W.columns)
    x_at = x + row.to(tl.int64)[None, :] * E.depth + first_inputs(W, E.step)[:, None]
    scales, zeros = weight.scales + blocks_at, weight.zeros + blocks_at
    of_expert = Operands(numbers, scales, zeros, weight.factors + own)
    total = sums(x_at, real, of_expert, line, 0, E.depth, E.depth, W, "")
    total = factored(total, of_expert.factors, line, W)
    if G.scaled:
        total *= tl.load(by_row + row)[None, :]
    if E.bias:
        total += tl.load(bias + expert * (2 * E.columns) + line).to(tl.float32)[:, None]
    gate, up = halves(total)
    activated = clamped_swiglu(gate, up, G.limit, G.alpha) if E.bias else gated(gate, up, G.gelu)
    column = tl.program_id(0) * (E.lines // 2) + tl.arange(0, E.lines // 2)
    out_at = out + place[None, :] * E.columns + column[:, None]
    tl.store(out_at, activated, mask=real[None, :] & (column < E.columns)[:, None])


@triton.jit
def _down_kernel(
    x,
    weight,
    bias,
    out,
    by_row,
    layout,
    E: tl.constexpr,
    W: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `moe._down_kernel`."""
    announce(OVERLAP)
    # the routing is there since the gate's launch
    blocks_there = tl.load(layout.num_blocks)
    expert, place, real = block_of(layout.blocks, tl.program_id(1), E.pairs)
    if tl.program_id(1) >= blocks_there:
        return
    column = tl.program_id(0) * E.lines + tl.arange(0, E.lines)
    line = tl.minimum(column, E.columns - 1).to(tl.int64)
    pair = tl.load(layout.order + place).to(tl.int64)
    factor = tl.load(by_row + pair).to(tl.float32)[None, :]
    own = expert * E.columns
    numbers = weight.numbers + own * words(E.depth, W)
    blocks_at = expert * ((E.columns + W.high - 1) // W.high * W.columns)
    wait(OVERLAP)
    x_at = x + place[None, :] * E.depth + first_inputs(W, E.step)[:, None]
    scales, zeros = weight.scales + blocks_at, weight.zeros + blocks_at
    of_expert = Operands(numbers, scales, zeros, weight.factors + own)
    total = sums(x_at, real, of_expert, line, 0, E.depth, E.depth, W, "")
    total = factored(total, of_expert.factors, line, W)
    if E.bias:
        total += tl.load(bias + expert * E.columns + line).to(tl.float32)[:, None]
    total *= factor
    out_at = out + pair[None, :] * E.columns + column[:, None]
    tl.store(out_at, total, mask=real[None, :] & (column < E.columns)[:, None])

"""Grouped products of experts whose weights are packed, inputs in 16 bits.

Pairs and blocks are as in `moe`, and so are the launches. As in `quantized_product` the weight is
the left operand: a tile is [lines, pairs], where lines of a gate and of what it gates alternate.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.moe import ALPHA, Clamped
from peagle.ops.triton import quantized_product
from peagle.ops.triton.expert_blocks import Routing, block_of
from peagle.ops.triton.launch import announce, overlap, wait
from peagle.ops.triton.packed_sums import Packing, factored, first_inputs, operands, sums, words
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
    """Of the weight, that a program has."""
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
    scales: Tensor | None,
    weight: QuantizedWeight,
    routing: Routing,
    clamped: Clamped | None,
    gelu: bool,
    out: Tensor,
) -> None:
    """Fill out [pairs, inner] in the order of `routing` with every pair's gated product.

    x: [rows, depth]; scales: [rows] what its products are multiplied by; gelu: GEGLU, not SwiGLU.
    """
    _launch(
        _gate_up_kernel,
        x,
        weight,
        None if clamped is None else clamped.gate_up,
        scales,
        routing,
        out,
        TOP_K=routing.top_k,
        SCALED=scales is not None,
        LIMIT=0.0 if clamped is None else clamped.limit,
        ALPHA=ALPHA,
        GELU=gelu,
    )


def down(
    x: Tensor, weight: QuantizedWeight, routing: Routing, clamped: Clamped | None, out: Tensor
) -> None:
    """Fill out [pairs, hidden] with x [places, depth] times the weight, weighed by the router."""
    bias = None if clamped is None else clamped.down
    _launch(_down_kernel, x, weight, bias, routing.weights, routing, out, **overlap(x))


def _launch(
    kernel: Any,
    x: Tensor,
    weight: QuantizedWeight,
    bias: Tensor | None,
    by_row: Tensor | None,
    routing: Routing,
    out: Tensor,
    **options: Any,
) -> None:
    columns, (lines, depth) = out.shape[1], weight.shape[1:]
    tiling = TILINGS[weight.format.name][routing.block > FEW_PAIRS]
    grid = (triton.cdiv(lines, tiling.lines), len(routing.blocks))
    kernel[grid](
        x,
        *operands(weight),
        out if bias is None else bias,
        out,
        out if by_row is None else by_row,
        routing.order,
        routing.blocks,
        routing.count,
        COLUMNS=columns,
        DEPTH=depth,
        BIAS=bias is not None,
        BLOCK_M=routing.block,
        BLOCK_N=tiling.lines,
        BLOCK_K=step_of(weight, tiling.depth),
        W=Packing.of(weight),
        **options,
        num_warps=4,
        num_stages=stages_for(tiling, weight.format.bits, routing.block, x),
    )


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
    numbers,
    scales,
    zeros,
    factors,
    bias,
    out,
    by_row,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    GELU: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `moe._gate_up_kernel`; a plain launch: after it, everything launched before is done."""
    blocks_there = tl.load(count)
    expert, place, real = block_of(blocks, tl.program_id(1), BLOCK_M)
    if tl.program_id(1) >= blocks_there:
        return
    row = tl.load(order + place) // TOP_K
    line = gate_lines(tl.program_id(0), COLUMNS, BLOCK_N)
    own = expert * (2 * COLUMNS)
    numbers += own * words(DEPTH, W)
    blocks_at = expert * ((2 * COLUMNS + W.high - 1) // W.high * W.columns)
    x_at = x + row.to(tl.int64)[None, :] * DEPTH + first_inputs(W, BLOCK_K)[:, None]
    total = sums(
        x_at, real, numbers, scales + blocks_at, zeros + blocks_at, line, 0, DEPTH, DEPTH, W, ""
    )
    total = factored(total, factors + own, line, W)
    if SCALED:
        total *= tl.load(by_row + row)[None, :]
    if BIAS:
        total += tl.load(bias + expert * (2 * COLUMNS) + line).to(tl.float32)[:, None]
    gate, up = halves(total)
    activated = clamped_swiglu(gate, up, LIMIT, ALPHA) if BIAS else gated(gate, up, GELU)
    column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    out_at = out + place[None, :] * COLUMNS + column[:, None]
    tl.store(out_at, activated, mask=real[None, :] & (column < COLUMNS)[:, None])


@triton.jit
def _down_kernel(
    x,
    numbers,
    scales,
    zeros,
    factors,
    bias,
    out,
    by_row,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    W: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """As `moe._down_kernel`."""
    announce(OVERLAP)
    # the routing is there since the gate's launch
    blocks_there = tl.load(count)
    expert, place, real = block_of(blocks, tl.program_id(1), BLOCK_M)
    if tl.program_id(1) >= blocks_there:
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, COLUMNS - 1).to(tl.int64)
    pair = tl.load(order + place).to(tl.int64)
    factor = tl.load(by_row + pair).to(tl.float32)[None, :]
    own = expert * COLUMNS
    numbers += own * words(DEPTH, W)
    blocks_at = expert * ((COLUMNS + W.high - 1) // W.high * W.columns)
    wait(OVERLAP)
    x_at = x + place[None, :] * DEPTH + first_inputs(W, BLOCK_K)[:, None]
    total = sums(
        x_at, real, numbers, scales + blocks_at, zeros + blocks_at, line, 0, DEPTH, DEPTH, W, ""
    )
    total = factored(total, factors + own, line, W)
    if BIAS:
        total += tl.load(bias + expert * COLUMNS + line).to(tl.float32)[:, None]
    total *= factor
    out_at = out + pair[None, :] * COLUMNS + column[:, None]
    tl.store(out_at, total, mask=real[None, :] & (column < COLUMNS)[:, None])

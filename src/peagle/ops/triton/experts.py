"""Grouped products of experts, whose weights are of any format.

Pairs and blocks are as in `moe`. As in `skinny_product` the weight is the left operand: a tile is
[lines, pairs], where lines of a gate and of what it gates alternate.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton import skinny_product
from peagle.ops.triton.expert_blocks import ExpertSizes, Gates, Routing, block_of
from peagle.ops.triton.fences import fence
from peagle.ops.triton.launch import announce, overlap, wait
from peagle.ops.triton.skinny_product import gate_lines, halves, room_of, stages_that_fit, step_of
from peagle.ops.triton.swiglu import clamped_swiglu, gated
from peagle.ops.triton.weights import Operands, Packing, bits_of, factored, operands, sums, words
from peagle.ops.weight import QuantizedWeight, Weight


@dataclass(frozen=True)
class MatrixSplit:
    """How a matrix is divided among programs."""

    lines: int
    """Lines of the weight that a program has."""
    depth: int
    """Inputs that it reads in a step; half as many where they are four bytes each."""
    stages: int = 4
    """Steps on their way from memory, and the one that is multiplied; at most, see `stages_for`."""
    warps: int = 4


FEW_PAIRS = 32
"""Most pairs in a block whose packed weights take longer to read than to multiply."""
LARGEST_BLOCK = 64
"""Most pairs in any block of packed weights: the sums of more outgrow four warps' registers; eight
are slower."""
EIGHT_BITS = MatrixSplit(64, 128), MatrixSplit(128, 128)
FOUR_BITS = MatrixSplit(64, 256), MatrixSplit(128, 128)
"""How packed weights are divided where pairs are few, and where they are many: for FP8 and MXFP4
the fastest on an H100, for other formats those of their like."""
# with few pairs more and thinner programs, so that more of the weight is on its way at once
FEW_DENSE = MatrixSplit(64, 128), MatrixSplit(64, 128)
MANY_DENSE = MatrixSplit(256, 64, 3, 8), MatrixSplit(128, 64, 3, 8)
DENSE = {16: FEW_DENSE, 128: MANY_DENSE}
"""How tensors are divided, by the pairs of a block: for gates and what they gate, and for down."""
SOME_DENSE = MatrixSplit(128, 64), MatrixSplit(128, 64)


def takes(weight: Weight) -> bool:
    """Whether these kernels cover a weight on its device."""
    return isinstance(weight, Tensor) or skinny_product.takes(weight, weight.device)


def split_of(weight: Weight, block: int, gates: bool) -> MatrixSplit:
    """How a weight is divided for so many pairs in a block. gates: whether it has gates."""
    if isinstance(weight, QuantizedWeight):
        return (FOUR_BITS if weight.format.bits == 4 else EIGHT_BITS)[block > FEW_PAIRS]
    return DENSE.get(block, SOME_DENSE)[not gates]


def gate_up(
    x: Tensor, weight: Weight, bias: Tensor | None, routing: Routing, gates: Gates, out: Tensor
) -> None:
    """Fill out [pairs, inner] in the order of `routing` with every pair's gated product.

    x: [rows, depth].
    """
    fence()
    _launch(_gate_up_kernel, x, weight, bias, routing.scales, routing, out, G=gates)


def down(x: Tensor, weight: Weight, bias: Tensor | None, routing: Routing, out: Tensor) -> None:
    """Fill out [pairs, hidden] with x [places, depth] times the weight, weighed by the router.

    The routing is read early: `gate_up`, a fence, comes in between.
    """
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
    (lines, depth), block = weight.shape[1:], routing.block
    split = split_of(weight, block, "G" in form)
    step = step_of(weight, split.depth)
    sizes = ExpertSizes(out.shape[1], depth, block, split.lines)
    kernel[(triton.cdiv(lines, split.lines), len(routing.layout.blocks))](
        x,
        operands(weight),
        bias,
        out,
        by_row,
        routing.layout,
        E=sizes,
        W=Packing.of(weight, step),
        **form,
        num_warps=split.warps,
        num_stages=stages_for(split, bits_of(weight), block, x),
    )


def stages_for(split: MatrixSplit, bits: int, pairs: int, x: Tensor) -> int:
    """The stages of a split for which a program has room beside so many pairs of rows like x.

    bits: of a number of the weight.
    """
    numbers = split.lines * split.depth
    of_weight = numbers // 2 + numbers // 32 if bits == 4 else numbers * bits // 8  # with scales
    step_bytes = of_weight + split.depth * pairs * x.element_size()
    return stages_that_fit(split.stages, step_bytes, room_of(x, numbers, bits))


@triton.jit
def _products(
    x_at, real, weight, line, expert, COUNT: tl.constexpr, E: tl.constexpr, W: tl.constexpr
):
    """Some lines of an expert that has so many, times rows: [lines, pairs]."""
    # each expert has whole blocks of scales of its own
    own = expert * COUNT
    blocks = expert * ((COUNT + W.high - 1) // W.high * W.columns)
    scales, zeros = weight.scales + blocks, weight.zeros + blocks
    numbers = weight.numbers + own * words(E.depth, W)
    of_expert = Operands(numbers, scales, zeros, weight.factors + own)
    total = sums(x_at, real, of_expert, line, 0, E.depth, E.depth, W, "")
    return factored(total, of_expert.factors, line, W)


@triton.jit
def _gate_up_kernel(
    x, weight, bias, out, by_row, layout, E: tl.constexpr, G: tl.constexpr, W: tl.constexpr
):
    """silu(gate) * up of a block's pairs, or where there is a bias `clamped_swiglu`.

    x: [rows, depth]; out: [places, columns]. A plain launch.
    """
    # both loads are under way at once: of a block that is not there nothing is used
    blocks_there = tl.load(layout.num_blocks)
    expert, place, real = block_of(layout.blocks, tl.program_id(1), E.pairs)
    if tl.program_id(1) >= blocks_there:
        return
    row = tl.load(layout.order + place) // G.top_k
    line = gate_lines(tl.program_id(0), E.columns, E.lines)
    x_at = x + row.to(tl.int64) * E.depth
    total = _products(x_at, real, weight, line, expert, 2 * E.columns, E, W)
    if by_row is not None:
        total *= tl.load(by_row + row)[None, :]
    if bias is not None:
        total += tl.load(bias + expert * (2 * E.columns) + line).to(tl.float32)[:, None]
    gate, up = halves(total)
    activated = (
        clamped_swiglu(gate, up, G.limit, G.alpha) if bias is not None else gated(gate, up, G.gelu)
    )
    column = tl.program_id(0) * (E.lines // 2) + tl.arange(0, E.lines // 2)
    out_at = out + place[None, :] * E.columns + column[:, None]
    tl.store(out_at, activated, mask=real[None, :] & (column < E.columns)[:, None])


@triton.jit
def _down_kernel(
    x, weight, bias, out, by_row, layout, E: tl.constexpr, W: tl.constexpr, OVERLAP: tl.constexpr
):
    """(x @ down.T) * router weight of a block's pairs. x: [places, depth]; out: [pairs, columns]"""
    announce(OVERLAP)
    blocks_there = tl.load(layout.num_blocks)
    # before the wait, since a fence, `gate_up`, came between routing and this launch
    expert, place, real = block_of(layout.blocks, tl.program_id(1), E.pairs)
    if tl.program_id(1) >= blocks_there:
        return
    column = tl.program_id(0) * E.lines + tl.arange(0, E.lines)
    line = tl.minimum(column, E.columns - 1).to(tl.int64)
    pair = tl.load(layout.order + place).to(tl.int64)
    factor = tl.load(by_row + pair).to(tl.float32)[None, :]
    wait(OVERLAP)
    x_at = x + place * E.depth
    total = _products(x_at, real, weight, line, expert, E.columns, E, W)
    if bias is not None:
        total += tl.load(bias + expert * E.columns + line).to(tl.float32)[:, None]
    total *= factor
    out_at = out + pair[None, :] * E.columns + column[:, None]
    tl.store(out_at, total, mask=real[None, :] & (column < E.columns)[:, None])

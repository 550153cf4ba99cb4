"""Grouped products of experts in FP8 on both sides: many rows, by weights that are made for it.

As `quantized_experts`, whose words these are, but inputs are rounded to FP8 first, with a scale for
each group of a row, so that tensor cores multiply what memory brings and nothing is widened. The
inputs are in the order of the weight's numbers. Sums of one block of the depth are multiplied by
its scales, and added up in float32.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.products.quantized_activations import BLOCK, MOST_EXACT
from peagle.ops.quantized_activations import QuantizedInputs, quantize
from peagle.ops.triton import on_hopper
from peagle.ops.triton.expert_blocks import Routing, block_of
from peagle.ops.triton.quantized_product import gate_lines, halves
from peagle.ops.triton.swiglu import gated
from peagle.ops.weight import Fp8Weight, Weight

LINES = 128
"""Of the weight, that a program has."""
STAGES = 4
LARGE = 128
"""Pairs of a block for which a program has eight warps."""


def takes(x: Tensor, gate_up: Weight, down: Weight) -> bool:
    """Whether a layer's products may round rows x, and these kernels cover the weights."""
    if len(x) <= MOST_EXACT or x.dtype != torch.bfloat16 or not on_hopper(x):
        return False
    return covers(gate_up) and covers(down)


def covers(weight: Weight) -> bool:
    """Whether a weight is made for rounded inputs, in blocks that the kernels multiply by."""
    if not isinstance(weight, Fp8Weight) or not weight.dynamic_activations:
        return False
    depth = weight.shape[-1]
    return depth % BLOCK == 0 and weight.block in ((1, depth), (BLOCK, BLOCK))


def gate_up(
    x: Tensor, scales: Tensor | None, weight: Weight, routing: Routing, gelu: bool, out: Tensor
) -> None:
    """Fill out [pairs, inner] as `quantized_experts.gate_up` does. Arguments as there."""
    flags = {"TOP_K": routing.top_k, "SCALED": scales is not None, "GELU": gelu}
    _launch(_gate_up_kernel, x, weight, scales, routing, out, **flags)


def down(x: Tensor, weight: Weight, routing: Routing, out: Tensor) -> None:
    """Fill out [pairs, hidden] with x [places, depth] times the weight, weighed by the router."""
    _launch(_down_kernel, x, weight, routing.weights, routing, out)


def _launch(
    kernel: Any,
    x: Tensor,
    weight: Weight,
    factors: Tensor | None,
    routing: Routing,
    out: Tensor,
    **flags: Any,
) -> None:
    assert isinstance(weight, Fp8Weight)
    (high, wide), (lines, depth) = weight.block, weight.shape[1:]
    inputs: QuantizedInputs = quantize(x, min(wide, depth), weight.run)
    kernel[(triton.cdiv(lines, LINES), len(routing.blocks))](
        inputs.numbers,
        inputs.scales,
        inputs.scales.stride(1),
        weight.numbers.view(torch.float8_e4m3fn),
        weight.factors,
        out,
        out if factors is None else factors,
        routing.order,
        routing.blocks,
        routing.count,
        COLUMNS=out.shape[1],
        DEPTH=depth,
        HIGH=high,
        WIDE=wide,
        BLOCK_M=routing.block,
        BLOCK_N=LINES,
        BLOCK_K=BLOCK,
        **flags,
        num_warps=8 if routing.block >= LARGE else 4,
        num_stages=STAGES,
    )


@triton.jit
def _sums(
    x,
    x_scales,
    scales_stride,
    source,
    real,
    numbers,
    factors,
    expert,
    line,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """An expert's lines [BLOCK_N], of `LINES`, times rows `source` of x [BLOCK_M], scaled."""
    across: tl.constexpr = (DEPTH + WIDE - 1) // WIDE
    down: tl.constexpr = (LINES + HIGH - 1) // HIGH
    place = tl.arange(0, BLOCK_K)
    x_at = x + source[None, :] * DEPTH + place[:, None]
    numbers_at = numbers + (expert * LINES + line)[:, None] * DEPTH + place[None, :]
    factors_at = factors + (expert * down + line // HIGH) * across
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        weight = tl.load(numbers_at + k)
        rows = tl.load(x_at + k, mask=real[None, :], other=0.0)
        factor = tl.load(factors_at + k // WIDE)
        scale = tl.load(x_scales + k // WIDE * scales_stride + source)
        total += tl.dot(weight, rows) * (factor[:, None] * scale[None, :])
    return total


@triton.jit(do_not_specialize=["scales_stride"])
def _gate_up_kernel(
    x,
    x_scales,
    scales_stride,
    numbers,
    factors,
    out,
    row_factors,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOP_K: tl.constexpr,
    SCALED: tl.constexpr,
    GELU: tl.constexpr,
):
    blocks_there = tl.load(count)
    expert, place, real = block_of(blocks, tl.program_id(1), BLOCK_M)
    if tl.program_id(1) >= blocks_there:
        return
    row = tl.load(order + place) // TOP_K
    line = gate_lines(tl.program_id(0), COLUMNS, BLOCK_N)
    total = _sums(
        x, x_scales, scales_stride, row.to(tl.int64), real, numbers, factors, expert, line,
        2 * COLUMNS, DEPTH, HIGH, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if SCALED:
        total *= tl.load(row_factors + row)[None, :]
    gate, up = halves(total)
    column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    out_at = out + place[None, :] * COLUMNS + column[:, None]
    keep = real[None, :] & (column < COLUMNS)[:, None]
    tl.store(out_at, gated(gate, up, GELU), mask=keep)


@triton.jit(do_not_specialize=["scales_stride"])
def _down_kernel(
    x,
    x_scales,
    scales_stride,
    numbers,
    factors,
    out,
    weights,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    blocks_there = tl.load(count)
    expert, place, real = block_of(blocks, tl.program_id(1), BLOCK_M)
    if tl.program_id(1) >= blocks_there:
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, COLUMNS - 1).to(tl.int64)
    total = _sums(
        x, x_scales, scales_stride, place, real, numbers, factors, expert, line, COLUMNS, DEPTH,
        HIGH, WIDE, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    pair = tl.load(order + place).to(tl.int64)
    total *= tl.load(weights + pair).to(tl.float32)[None, :]
    keep = real[None, :] & (column < COLUMNS)[:, None]
    tl.store(out + pair[None, :] * COLUMNS + column[:, None], total, mask=keep)

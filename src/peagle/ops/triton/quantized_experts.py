"""Grouped products of experts whose weights are packed: FP8 or MXFP4, inputs in 16 bits.

Pairs and blocks are as in `moe`, and so are the launches. As in `quantized_product` the weight is
the left operand: a tile is [lines, pairs], where lines of a gate and of what it gates alternate.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.moe import ALPHA, Clamped
from peagle.ops.triton import quantized_product
from peagle.ops.triton.expert_blocks import Routing, block_of
from peagle.ops.triton.launch import announce, overlap, wait
from peagle.ops.triton.quantized_product import gate_lines, halves, room_of, stages_that_fit
from peagle.ops.triton.swiglu import clamped_swiglu, gated
from peagle.ops.triton.widening import e2m1, e4m3, powers, unshifted
from peagle.ops.weight import Fp8Weight, Mxfp4Weight, Weight

Packed = Fp8Weight | Mxfp4Weight


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
TILINGS = {
    ("fp8", True): MatrixSplit(64, 128, 4),
    ("mxfp4", True): MatrixSplit(64, 256, 4),
    ("fp8", False): MatrixSplit(128, 128, 4),
    ("mxfp4", False): MatrixSplit(128, 128, 4),
}
"""The fastest on an H100, by format and whether pairs are few."""


def takes(weight: Weight) -> bool:
    """Whether these kernels cover a packed weight on its device."""
    if isinstance(weight, Fp8Weight):
        return quantized_product.takes(weight, weight.device)
    return isinstance(weight, Mxfp4Weight)


def gate_up(
    x: Tensor,
    scales: Tensor | None,
    weight: Packed,
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


def down(x: Tensor, weight: Packed, routing: Routing, clamped: Clamped | None, out: Tensor) -> None:
    """Fill out [pairs, hidden] with x [places, depth] times the weight, weighed by the router."""
    bias = None if clamped is None else clamped.down
    _launch(_down_kernel, x, weight, bias, routing.weights, routing, out, **overlap(x))


def _launch(
    kernel: Any,
    x: Tensor,
    weight: Packed,
    bias: Tensor | None,
    factors: Tensor | None,
    routing: Routing,
    out: Tensor,
    **options: Any,
) -> None:
    columns, (lines, depth) = out.shape[1], weight.shape[1:]
    tiling = TILINGS[weight.format, routing.block <= FEW_PAIRS]
    grid = (triton.cdiv(lines, tiling.lines), len(routing.blocks))
    kernel[grid](
        x,
        *_tensors(weight),
        out if bias is None else bias,
        out,
        out if factors is None else factors,
        routing.order,
        routing.blocks,
        routing.count,
        COLUMNS=columns,
        DEPTH=depth,
        BIAS=bias is not None,
        BLOCK_M=routing.block,
        BLOCK_N=tiling.lines,
        **_constants(weight, tiling),
        **options,
        num_warps=4,
        num_stages=stages_for(tiling, weight.format, routing.block, x),
    )


def stages_for(tiling: MatrixSplit, kind: str, pairs: int, x: Tensor) -> int:
    """The stages of a tiling for which a program has room beside so many pairs of rows like x.

    kind: the weight's format.
    """
    numbers = tiling.lines * tiling.depth
    codes = numbers if kind == "fp8" else numbers // 2 + numbers // 32  # with their scales
    step_bytes = codes + tiling.depth * pairs * x.element_size()
    return stages_that_fit(tiling.stages, step_bytes, room_of(x, numbers))


def _tensors(weight: Packed) -> tuple[Tensor, Tensor]:
    """Numbers and scales as a kernel reads them."""
    scales = weight.factors if isinstance(weight, Fp8Weight) else weight.scales
    return weight.numbers.view(torch.int16), scales


def _constants(weight: Packed, tiling: MatrixSplit) -> dict[str, Any]:
    """What a kernel is compiled with for a format."""
    if isinstance(weight, Mxfp4Weight):
        # a step must not go beyond the scales, which are there for multiples of 512 inputs
        return {"MXFP4": True, "RUN": weight.run, "HIGH": 1, "WIDE": 32, "BLOCK_K": tiling.depth}
    (high, wide), depth = weight.block, weight.shape[-1]
    step = tiling.depth if wide >= depth else math.gcd(tiling.depth, wide)
    return {"MXFP4": False, "RUN": weight.run, "HIGH": high, "WIDE": wide, "BLOCK_K": step}


@triton.jit
def _repeated(x, times: tl.constexpr):
    """Each column of x several times in a row."""
    runs = x[:, :, None].broadcast_to(x.shape[0], x.shape[1], times)
    return runs.reshape(x.shape[0], x.shape[1] * times)


@triton.jit
def _sums(
    x,
    source,
    real,
    numbers,
    scales,
    line,
    MXFP4: tl.constexpr,
    RUN: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Lines of the weight [BLOCK_N] times rows `source` of x [BLOCK_M]: [BLOCK_N, BLOCK_M]."""
    if MXFP4:
        return _mxfp4_sums(x, source, real, numbers, scales, line, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return _fp8_sums(
            x, source, real, numbers, scales, line, RUN, HIGH, WIDE, DEPTH, BLOCK_M, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip


@triton.jit
def _fp8_sums(
    x,
    source,
    real,
    codes,
    scales,
    line,
    RUN: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    blocks: tl.constexpr = (DEPTH + WIDE - 1) // WIDE
    place = tl.arange(0, BLOCK_K // 2)
    half: tl.constexpr = RUN // 2
    x_at = x + source[None, :] * DEPTH + (place // half * RUN + place % half)[:, None]
    codes_at = codes + line[:, None] * (DEPTH // 2) + place[None, :]
    scales_at = scales + (line // HIGH) * blocks
    scale = tl.load(scales_at)
    for k in range(0, DEPTH, BLOCK_K):
        coming = tl.load(scales_at + tl.minimum(k + BLOCK_K, DEPTH - 1) // WIDE)  # a step ahead
        inside = place < (DEPTH - k) // 2
        found = tl.load(codes_at + k // 2, mask=inside[None, :], other=0)
        lower, upper = e4m3(found, kind)
        mask = inside[:, None] & real[None, :]
        part = tl.dot(lower, tl.load(x_at + k, mask=mask, other=0.0), input_precision="ieee")
        a = tl.load(x_at + k + half, mask=mask, other=0.0)
        part = tl.dot(upper, a, part, input_precision="ieee")
        total += part * scale[:, None]
        scale = coming
    return total


@triton.jit
def _mxfp4_sums(
    x,
    source,
    real,
    codes,
    scales,
    line,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """16 bits have four numbers, of inputs that are 16 apart: four products in a step."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    kind: tl.constexpr = x.dtype.element_ty
    width: tl.constexpr = (DEPTH + 63) // 64 * 16
    scales_wide: tl.constexpr = (DEPTH + 511) // 512 * 16
    place, run = tl.arange(0, BLOCK_K // 4), tl.arange(0, BLOCK_K // 32)
    at = place // 16 * 64
    x_at = x + source[None, :] * DEPTH + (at + place % 16)[:, None]
    codes_at = codes + line[:, None] * width + place[None, :]
    scales_at = scales + line[:, None] * scales_wide + run[None, :]
    for k in range(0, DEPTH, BLOCK_K):
        found = tl.load(codes_at + k // 4, mask=(place < width - k // 4)[None, :], other=0)
        scale = powers(tl.load(scales_at + k // 32), kind)
        first, last = scale.reshape(BLOCK_N, BLOCK_K // 64, 2).split()
        one, two, three, four = e2m1(found, _repeated(first, 16), _repeated(last, 16), kind)
        inside = (at < DEPTH - k)[:, None] & real[None, :]
        a = tl.load(x_at + k, mask=inside, other=0.0)
        total = tl.dot(one, a, total, input_precision="ieee")
        a = tl.load(x_at + k + 16, mask=inside, other=0.0)
        total = tl.dot(two, a, total, input_precision="ieee")
        inside = (at + 32 < DEPTH - k)[:, None] & real[None, :]
        a = tl.load(x_at + k + 32, mask=inside, other=0.0)
        total = tl.dot(three, a, total, input_precision="ieee")
        a = tl.load(x_at + k + 48, mask=inside, other=0.0)
        total = tl.dot(four, a, total, input_precision="ieee")
    return unshifted(total, kind)


@triton.jit
def _gate_up_kernel(
    x,
    numbers,
    factors,
    bias,
    out,
    scales,
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
    MXFP4: tl.constexpr,
    RUN: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
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
    own, rows = _of_expert(numbers, factors, expert, 2 * COLUMNS, DEPTH, MXFP4, HIGH, WIDE)
    total = _sums(
        x,
        row.to(tl.int64),
        real,
        own,
        rows,
        line,
        MXFP4,
        RUN,
        HIGH,
        WIDE,
        DEPTH,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    if SCALED:
        total *= tl.load(scales + row)[None, :]
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
    factors,
    bias,
    out,
    weights,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    MXFP4: tl.constexpr,
    RUN: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
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
    factor = tl.load(weights + pair).to(tl.float32)[None, :]
    own, rows = _of_expert(numbers, factors, expert, COLUMNS, DEPTH, MXFP4, HIGH, WIDE)
    wait(OVERLAP)
    total = _sums(
        x, place, real, own, rows, line, MXFP4, RUN, HIGH, WIDE, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K
    )
    if BIAS:
        total += tl.load(bias + expert * COLUMNS + line).to(tl.float32)[:, None]
    total *= factor
    out_at = out + pair[None, :] * COLUMNS + column[:, None]
    tl.store(out_at, total, mask=real[None, :] & (column < COLUMNS)[:, None])


@triton.jit
def _of_expert(
    numbers,
    scales,
    expert,
    lines: tl.constexpr,
    DEPTH: tl.constexpr,
    MXFP4: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Where an expert's numbers and scales begin."""
    if MXFP4:
        width: tl.constexpr = (DEPTH + 63) // 64 * 16
        scales_wide: tl.constexpr = (DEPTH + 511) // 512 * 16
        return numbers + expert * (lines * width), scales + expert * (lines * scales_wide)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        across: tl.constexpr = (DEPTH + WIDE - 1) // WIDE
        down: tl.constexpr = (lines + HIGH - 1) // HIGH
        return numbers + expert * (lines * DEPTH // 2), scales + expert * (down * across)

"""Grouped products of experts whose weights are packed: FP8 or MXFP4, inputs in 16 bits.

Pairs and blocks are as in `moe`, and so are the launches. Here the weight is the left operand, as
in `quantized_product`: a tile is [outputs, pairs]. Numbers are widened in registers, where both
formats are exact in bfloat16.
"""

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.moe import ALPHA, Clamped
from peagle.ops.triton import quantized_product
from peagle.ops.triton.launch import announce, overlap, wait
from peagle.ops.triton.routing import Routing, block_of
from peagle.ops.triton.swiglu import clamped_swiglu
from peagle.ops.weight import Fp8Weight, Mxfp4Weight, Weight

OUTPUTS = 64
"""Outputs that a program computes; where they are gated, of each half."""
MXFP4_DEPTH = 128
"""Inputs of MXFP4 that a program reads in a step: two runs for each 64 bytes."""
FP8_DEPTH = 128
"""Of FP8."""
Packed = Fp8Weight | Mxfp4Weight


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
    out: Tensor,
) -> None:
    """Fill out [pairs, inner] in the order of `routing` with every pair's gated product.

    x: [rows, depth]; scales: [rows] what its products are multiplied by.
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
    **form: Any,
) -> None:
    columns, depth = out.shape[1], x.shape[1]
    grid = (triton.cdiv(columns, OUTPUTS), len(routing.blocks))
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
        BLOCK_N=OUTPUTS,
        **_form(weight, depth),
        **form,
        num_warps=4,
        num_stages=3,
    )


def _tensors(weight: Packed) -> tuple[Tensor, Tensor]:
    """Numbers and scales as a kernel reads them."""
    if isinstance(weight, Fp8Weight):
        return weight.values, weight.factors
    return weight.numbers, weight.scales


def _form(weight: Packed, depth: int) -> dict[str, Any]:
    """What a kernel is compiled with for a format."""
    if isinstance(weight, Mxfp4Weight):
        return {"MXFP4": True, "HIGH": 1, "WIDE": 1, "BLOCK_K": MXFP4_DEPTH}
    high, wide = weight.block
    step = FP8_DEPTH if wide >= depth else math.gcd(FP8_DEPTH, wide)
    return {"MXFP4": False, "HIGH": high, "WIDE": wide, "BLOCK_K": step}


@triton.jit
def _e2m1(code):
    """Float32 numbers from four bits each: a sign, two of exponent, one of mantissa."""
    code = code.to(tl.int32)
    magnitude = code & 7
    # two bits of exponent and one of mantissa are where float32 has its lowest and highest; one
    # half, the only subnormal, has neither
    bits = tl.where(magnitude > 1, (magnitude + 252) << 22, magnitude * 0x3F000000)
    bits |= (code >> 3) << 31
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _power(exponent):
    """Two to the power of E8M0 bytes, which are exponents + 127; the least becomes 0."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _sums(
    x,
    source,
    numbers,
    scales,
    line,
    MXFP4: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Lines of the weight [BLOCK_N] times rows `source` of x [BLOCK_M]: [BLOCK_N, BLOCK_M]."""
    if MXFP4:
        return _mxfp4_sums(x, source, numbers, scales, line, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return _fp8_sums(
            x, source, numbers, scales, line, HIGH, WIDE, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K
        )


@triton.jit
def _fp8_sums(
    x,
    source,
    numbers,
    scales,
    line,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    blocks: tl.constexpr = (DEPTH + WIDE - 1) // WIDE
    step = tl.arange(0, BLOCK_K)
    x_at = x + source[None, :] * DEPTH + step[:, None]
    numbers_at = numbers + line[:, None] * DEPTH + step[None, :]
    scales_at = scales + (line // HIGH) * blocks
    for k in range(0, DEPTH, BLOCK_K):
        inside = step < DEPTH - k
        a = tl.load(x_at + k, mask=inside[:, None], other=0.0)
        w = tl.load(numbers_at + k, mask=inside[None, :], other=0.0)
        part = tl.dot(w.to(a.dtype), a, input_precision="ieee")
        total += part * tl.load(scales_at + k // WIDE)[:, None]
    return total


@triton.jit
def _mxfp4_sums(
    x,
    source,
    numbers,
    scales,
    line,
    DEPTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """In each chunk of 64 inputs the low bits have the first half, the high bits the second."""
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    chunks: tl.constexpr = (DEPTH + 63) // 64
    byte, pair = tl.arange(0, BLOCK_K // 2), tl.arange(0, BLOCK_K // 32)
    low = byte // 32 * 64 + byte % 32
    x_at = x + source[None, :] * DEPTH + low[:, None]
    numbers_at = numbers + line[:, None] * (chunks * 32) + byte[None, :]
    scales_at = scales + line[:, None] * (chunks * 2) + pair[None, :]
    for k in range(0, DEPTH, BLOCK_K):
        inside = byte < chunks * 32 - k // 2
        codes = tl.load(numbers_at + k // 2, mask=inside[None, :], other=0)
        inside = pair < chunks * 2 - k // 32
        powers = tl.load(scales_at + k // 32, mask=inside[None, :], other=0)
        powers = tl.reshape(_power(powers), [BLOCK_N, BLOCK_K // 64, 2])
        first, second = tl.split(powers)
        a = tl.load(x_at + k, mask=(low < DEPTH - k)[:, None], other=0.0)
        w = _times(_e2m1(codes & 15), first)
        total = tl.dot(w.to(a.dtype), a, total, input_precision="ieee")
        a = tl.load(x_at + k + 32, mask=(low + 32 < DEPTH - k)[:, None], other=0.0)
        w = _times(_e2m1(codes >> 4), second)
        total = tl.dot(w.to(a.dtype), a, total, input_precision="ieee")
    return total


@triton.jit
def _times(values, powers):
    """Values [N, BYTES] times the power that each run of 32 shares: powers [N, BYTES / 32]."""
    runs = tl.reshape(values, [values.shape[0], powers.shape[1], 32])
    return tl.reshape(runs * powers[:, :, None], values.shape)


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
    MXFP4: tl.constexpr,
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
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    line = tl.minimum(column, COLUMNS - 1).to(tl.int64)
    own = expert * (2 * COLUMNS) + line
    numbers, factors = _of_expert(numbers, factors, expert, 2 * COLUMNS, DEPTH, MXFP4, HIGH, WIDE)
    source = row.to(tl.int64)
    gate = _sums(
        x, source, numbers, factors, line, MXFP4, HIGH, WIDE, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K
    )
    up = _sums(
        x, source, numbers, factors, line + COLUMNS, MXFP4, HIGH, WIDE, DEPTH, BLOCK_M,
        BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if SCALED:
        scale = tl.load(scales + row)[None, :]
        gate *= scale
        up *= scale
    if BIAS:
        gate += tl.load(bias + own).to(tl.float32)[:, None]
        up += tl.load(bias + own + COLUMNS).to(tl.float32)[:, None]
        activated = clamped_swiglu(gate, up, LIMIT, ALPHA)
    else:
        activated = gate * tl.sigmoid(gate) * up
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
    total = _sums(x, place, own, rows, line, MXFP4, HIGH, WIDE, DEPTH, BLOCK_M, BLOCK_N, BLOCK_K)
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
        chunks: tl.constexpr = (DEPTH + 63) // 64
        return numbers + expert * (lines * chunks * 32), scales + expert * (lines * chunks * 2)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        across: tl.constexpr = (DEPTH + WIDE - 1) // WIDE
        down: tl.constexpr = (lines + HIGH - 1) // HIGH
        return numbers + expert * (lines * DEPTH), scales + expert * (down * across)

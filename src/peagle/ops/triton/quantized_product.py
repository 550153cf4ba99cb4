"""Products with weights in FP8 of inputs in 16 bits, with what is around them in the same launch.

The weight is the left operand, so that a tile is [outputs, rows]: a tensor core's instruction wants
64 lines of its left operand and as few as 8 of its right one, and the left one may come from
registers, where the numbers are widened. E4M3 is exact in 16 bits; scales multiply float32 sums of
one block of the depth each. How the depth is divided follows from the weight alone, so that a row's
sums do not depend on the number of rows.
"""

import functools
import math
import warnings
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.products.product import Epilogue
from peagle.ops.triton.launch import announce, counters, multiprocessors, overlap, wait
from peagle.ops.triton.tiles import padded
from peagle.ops.weight import Fp8Weight

OUTPUTS, DEPTH = 64, 128
"""Of the weight, that a program reads in a step."""
SHALLOWEST = 16
"""Depth of a tensor core's instruction; blocks of other widths are left to torch."""
CONVERTS_E4M3 = (8, 9)
"""The first compute capability that does."""
MOST_ROWS = 128
"""That a program has; more are divided among programs."""
FUSED_ROWS = 64
"""Most rows whose sums of squares a product leaves for the next one."""


@dataclass(frozen=True)
class Addition:
    """What a product is added to, and what comes of it."""

    stream: Tensor
    """[rows, outputs]"""
    norm: Tensor
    """[outputs] the next norm's weight"""
    scaled: Tensor
    """[rows, outputs] the sum times `norm`"""
    squares: Tensor
    """[tiles, rows] the sum's squares, of each tile of outputs"""


def takes(weight: Fp8Weight, device: torch.device) -> bool:
    """Whether the kernel covers a weight's blocks, and the GPU has its instructions."""
    wide = weight.block[1]
    return able(device) and (wide >= weight.shape[-1] or wide % SHALLOWEST == 0)


@functools.cache
def able(device: torch.device) -> bool:
    """Whether a GPU converts E4M3; warns once where it does not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= CONVERTS_E4M3:
        return True
    name = torch.cuda.get_device_name(device)
    warnings.warn(f"{name} has no FP8 instructions: FP8 weights are slow on it", stacklevel=2)
    return False


def linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: Fp8Weight, bias: Tensor | None
) -> Tensor:
    """`(x / rms) @ weight.T + bias`; squares: the parts of the sum of squares, None for no rms."""
    out = x.new_empty(len(x), len(weight))
    _launch(Epilogue.NONE, x, squares, eps, weight, bias, out)
    return out


def gated(x: Tensor, squares: Tensor | None, eps: float, weight: Fp8Weight) -> Tensor:
    """silu(gate) * up of the two halves of a product: [rows, len(weight) / 2]."""
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(Epilogue.GATE, x, squares, eps, weight, None, out)
    return out


def add(
    x: Tensor, weight: Fp8Weight, bias: Tensor | None, stream: Tensor, norm: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`stream + x @ weight.T + bias`, that times norm, and the parts of its squares."""
    out, scaled = torch.empty_like(stream), torch.empty_like(stream)
    tiles = triton.cdiv(len(weight), OUTPUTS)
    squares = torch.empty(tiles, padded(len(x)), device=x.device, dtype=torch.float32)
    addition = Addition(stream, norm, scaled, squares)
    _launch(Epilogue.ADD, x, None, 0.0, weight, bias, out, addition)
    return out, scaled, squares


def splits_of(outputs: int, depth: int, programs: int) -> int:
    """How many programs share a tile's depth: as many as keep all multiprocessors at work."""
    tiles, steps = triton.cdiv(outputs, OUTPUTS), triton.cdiv(depth, DEPTH)
    wanted = max(programs // tiles, 1)
    return max(count for count in range(1, min(wanted, steps, 8) + 1) if steps % count == 0)


def _launch(
    epilogue: Epilogue,
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Fp8Weight,
    bias: Tensor | None,
    out: Tensor,
    addition: Addition | None = None,
) -> None:
    (rows, depth), outputs = x.shape, out.shape[1]
    high, wide = weight.block
    step = DEPTH if wide >= depth else math.gcd(DEPTH, wide)
    splits = splits_of(outputs, depth, multiprocessors(x))
    height = min(padded(rows), MOST_ROWS)
    tiles, across = triton.cdiv(outputs, OUTPUTS), triton.cdiv(rows, height)
    partial, arrivals = out, out
    if splits > 1:
        size = 2 * tiles * across * splits * OUTPUTS * height
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrivals = counters(x.device, tiles * across)
    stream, norm, scaled, sums = (out,) * 4 if addition is None else vars(addition).values()
    _product[(tiles, across, splits)](
        x,
        out if squares is None else squares,
        weight.values,
        weight.factors,
        out if bias is None else bias,
        stream,
        norm,
        out,
        scaled,
        sums,
        partial,
        arrivals,
        rows,
        outputs,
        depth,
        0 if squares is None else len(squares),
        0 if squares is None else squares.shape[1],
        eps,
        HIGH=high,
        WIDE=wide,
        BLOCKS=triton.cdiv(depth, wide),
        ROWS=height,
        OUTPUTS=OUTPUTS,
        DEPTH=step,
        SPLITS=splits,
        PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
        SCALED=squares is not None,
        BIAS=bias is not None,
        GATED=epilogue is Epilogue.GATE,
        ADDS=addition is not None,
        **overlap(x),
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _sums(
    x_at,
    real,
    numbers,
    factors,
    line,
    first,
    past,
    depth,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The product of some lines of the weight and a range of the depth: [OUTPUTS, ROWS]."""
    step = tl.arange(0, DEPTH)
    numbers_at = numbers + line[:, None] * depth + step[None, :]
    factors_at = factors + (line // HIGH) * BLOCKS
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for k in range(first, past, DEPTH):
        inside = step < past - k
        a = tl.load(x_at + k, mask=inside[:, None] & real[None, :], other=0.0)
        w = tl.load(numbers_at + k, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        part = tl.dot(w.to(a.dtype), a, input_precision="ieee")
        if BLOCKS > 1:
            part *= tl.load(factors_at + k // WIDE)[:, None]
        total += part
    if BLOCKS == 1:
        total *= tl.load(factors_at)[:, None]
    return total


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    squares,
    numbers,
    factors,
    bias,
    stream,
    norm,
    out,
    scaled,
    sums,
    partial,
    arrivals,
    rows,
    outputs,
    depth,
    parts,
    held,
    eps,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCKS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADDS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    announce(OVERLAP)
    tile, split = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    real, inside = row < rows, column < outputs
    line = tl.minimum(column, outputs - 1).to(tl.int64)
    step = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[None, :] * depth + step[:, None]
    share = tl.cdiv(tl.cdiv(depth, DEPTH), SPLITS) * DEPTH
    first = split * share
    past = tl.minimum(first + share, depth)
    wait(OVERLAP)
    total = _sums(
        x_at, real, numbers, factors, line, first, past, depth, HIGH, WIDE, BLOCKS, ROWS, OUTPUTS,
        DEPTH,
    )  # fmt: skip
    up = total
    if GATED:
        up = _sums(
            x_at, real, numbers, factors, line + outputs, first, past, depth, HIGH, WIDE, BLOCKS,
            ROWS, OUTPUTS, DEPTH,
        )  # fmt: skip
    if SPLITS > 1:
        size: tl.constexpr = OUTPUTS * ROWS
        place = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        own = tl.program_id(1) * tl.num_programs(0) + tile
        at = partial + own * (2 * SPLITS * size) + place
        tl.store(at + 2 * split * size, total)
        if GATED:
            tl.store(at + (2 * split + 1) * size, up)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + own, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals + own, 0)
        tl.debug_barrier()
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        up = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(at + 2 * other * size, cache_modifier=".cg")
            if GATED:
                up += tl.load(at + (2 * other + 1) * size, cache_modifier=".cg")
    if SCALED:
        part = tl.arange(0, PARTS)
        at = squares + part[:, None] * held + row[None, :]
        found = tl.load(at, mask=(part < parts)[:, None] & real[None, :], other=0.0)
        factor = tl.rsqrt(tl.sum(found, 0) / depth + eps)
        total = total * factor[None, :]
        up = up * factor[None, :]
    if BIAS:
        total += tl.load(bias + line).to(tl.float32)[:, None]
    kind = out.dtype.element_ty
    if GATED:
        # rounded as a product is that is written before its gate is taken
        total = total.to(kind).to(tl.float32)
        up = up.to(kind).to(tl.float32)
        total = total * tl.sigmoid(total) * up
    place = row.to(tl.int64)[None, :] * outputs + column[:, None]
    keep = real[None, :] & inside[:, None]
    if ADDS:
        total = total.to(kind).to(tl.float32)
        total += tl.load(stream + place, mask=keep, other=0.0).to(tl.float32)
    y = total.to(kind)
    tl.store(out + place, y, mask=keep)
    if ADDS:
        stored = tl.where(keep, y.to(tl.float32), 0.0)
        factor = tl.load(norm + line).to(tl.float32)
        tl.store(scaled + place, (stored * factor[:, None]).to(kind), mask=keep)
        tl.store(sums + tile * ROWS + tl.arange(0, ROWS), tl.sum(stored * stored, 0))

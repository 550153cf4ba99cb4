"""Products of few rows, with the norm before them and the addition after them in the same launch.

With few rows a product is bound by reading its weight, and every further launch costs what some
10 MB of reading take. `tiles.takes` says where they beat cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.products.product import Epilogue
from peagle.ops.triton.launch import announce, begin, overlap, wait
from peagle.ops.triton.product_call import ProductCall, gathered, left
from peagle.ops.triton.tiles import padded, tile_of


def launch(call: ProductCall) -> None:
    """Fill a call's results. Its weight is a tensor."""
    (rows, depth), outputs, height = call.x.shape, call.out.shape[1], padded(len(call.x))
    tile = tile_of(call.x, outputs, call.epilogue is Epilogue.GATE)
    tiles, (squares, bias) = triton.cdiv(outputs, tile.columns), call.operands
    _product[(tiles, tile.splits)](
        call.x,
        squares,
        call.weight,
        bias,
        call.results(tiles, tile.splits, height * tile.columns),
        rows,
        outputs,
        depth,
        call.shape[0],
        call.eps,
        ROWS=height,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        F=call.form(tile.splits),
        **overlap(call.x, tile.overlaps),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def warps_of_norm(block: int) -> int:
    """For a program that norms a row of so many columns, with whatever is around it: the order of
    its sum follows from them, and rows are normed by one kernel or another."""
    return 8 if block > 1024 else 4


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As the reference; x: [rows, width] with any row stride."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _rms_norm[(len(x),)](
        x,
        weight,
        out,
        width,
        x.stride(0),
        eps,
        BLOCK=block,
        **overlap(x),
        num_warps=warps_of_norm(block),
    )
    return out


def add_rms_norm(stream: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`stream + x`, and that normed: [rows, width] both."""
    total, out = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[1]
    block = triton.next_power_of_2(width)
    _add_rms_norm[(len(x),)](
        stream,
        x,
        weight,
        total,
        out,
        width,
        eps,
        BLOCK=block,
        **overlap(x),
        num_warps=warps_of_norm(block),
    )
    return total, out


@triton.jit
def _product(
    x,
    squares,
    weight,
    bias,
    results,
    rows,
    outputs,
    depth,
    parts,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    F: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    announce(OVERLAP)
    tile = tl.program_id(0)
    row = tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    real = (row < rows)[:, None]
    inside = (column < outputs)[None, :]
    # columns past the end read the last one: no mask in the loop
    source = tl.minimum(column, outputs - 1).to(tl.int64)
    x_at = x + row[:, None] * depth + step[None, :]
    weight_at = weight + source[None, :] * depth + step[:, None]
    up_at = weight_at + tl.cast(outputs, tl.int64) * depth
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    wait(OVERLAP)
    share = depth // F.splits
    first = tl.program_id(1) * share
    for k in range(first, first + share, DEPTH):
        a = tl.load(x_at + k, mask=real, other=0.0)
        w = tl.load(weight_at + k, eviction_policy="evict_first")
        total = tl.dot(a, w, total, input_precision="ieee")
        if F.gated:
            u = tl.load(up_at + k, eviction_policy="evict_first")
            up = tl.dot(a, u, up, input_precision="ieee")
    if F.splits > 1:
        size: tl.constexpr = ROWS * COLUMNS
        inner = tile * F.splits * size + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        at = results.partial + inner
        if not left(total, at, tl.program_id(1), results.arrivals, tile, F.splits):
            return
        total = gathered(at, results.arrivals, tile, F.splits)
    if F.scaled:
        part = tl.arange(0, F.parts)
        found = tl.load(
            squares + part[:, None] * ROWS + row[None, :], mask=(part < parts)[:, None], other=0.0
        )
        factor = tl.rsqrt(tl.sum(found, 0) / depth + eps)
        total = total * factor[:, None]
        up = up * factor[:, None]
    if F.bias:
        total += tl.load(bias + source).to(tl.float32)[None, :]
    if F.gated:
        # rounded as a product is that is written before its gate is taken: rows that come with
        # others may have been multiplied that way
        total = total.to(results.out.dtype.element_ty).to(tl.float32)
        up = up.to(results.out.dtype.element_ty).to(tl.float32)
        total = total * tl.sigmoid(total) * up
    place = row[:, None] * outputs + column[None, :]
    keep = real & inside
    if F.adds:
        before = tl.load(results.stream + place, mask=keep, other=0.0).to(tl.float32)
        total = total.to(results.out.dtype.element_ty).to(tl.float32) + before
    y = total.to(results.out.dtype.element_ty)
    tl.store(results.out + place, y, mask=keep)
    if F.adds:
        stored = tl.where(keep, y.to(tl.float32), 0.0)
        factor = tl.load(results.norm + source).to(tl.float32)
        tl.store(
            results.scaled + place,
            (stored * factor[None, :]).to(results.out.dtype.element_ty),
            mask=keep,
        )
        tl.store(results.squares + tile * ROWS + row, tl.sum(stored * stored, 1))


@triton.jit
def _rms_norm(x, weight, out, width, stride, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (value * factor * scale).to(out.dtype.element_ty), inside)


@triton.jit
def _add_rms_norm(
    stream, x, weight, total, out, width, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    begin(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    before = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    value = before + tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(out.dtype.element_ty), mask=inside)
    value = value.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * factor * scale).to(out.dtype.element_ty), mask=inside)

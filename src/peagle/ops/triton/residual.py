"""Products of few rows, with the norm before them and the addition after them in the same launch.

With few rows a product is bound by reading its weight, and every further launch costs what some
10 MB of reading take. `tiles.takes` says where they beat cuBLAS.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.products.product import Epilogue
from peagle.ops.triton.launch import announce, begin, counters, overlap, wait
from peagle.ops.triton.tiles import padded, tile_of


def linear(
    x: Tensor, squares: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """`(x / rms) @ weight.T + bias`; squares: the parts of the sum of squares, None for no rms."""
    out = x.new_empty(len(x), len(weight))
    _launch(Epilogue.NONE, x, squares, eps, weight, bias, out)
    return out


def gated(x: Tensor, squares: Tensor | None, eps: float, weight: Tensor) -> Tensor:
    """silu(gate) * up of the two halves of a product: [rows, len(weight) / 2]."""
    out = x.new_empty(len(x), len(weight) // 2)
    _launch(Epilogue.GATE, x, squares, eps, weight, None, out)
    return out


def add(
    x: Tensor, weight: Tensor, bias: Tensor | None, stream: Tensor, norm_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`stream + x @ weight.T + bias`, that times norm_weight, and the parts of its squares."""
    out, scaled = torch.empty_like(stream), torch.empty_like(stream)
    parts = triton.cdiv(len(weight), tile_of(x, len(weight), Epilogue.ADD).columns)
    squares = torch.empty(parts, padded(len(x)), device=x.device, dtype=torch.float32)
    _launch(Epilogue.ADD, x, None, 0.0, weight, bias, out, (stream, norm_weight, scaled, squares))
    return out, scaled, squares


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


def _launch(
    epilogue: Epilogue,
    x: Tensor,
    squares: Tensor | None,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    addition: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    rows, depth = x.shape
    outputs = out.shape[1]
    tile = tile_of(x, outputs, epilogue)
    stream, norm_weight, scaled, sums = addition or (out, out, out, out)
    tiles = triton.cdiv(outputs, tile.columns)
    partial, arrivals = out, out
    if tile.splits > 1:
        size = tiles * tile.splits * padded(rows) * tile.columns
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        arrivals = counters(x.device, tiles)
    _product[(tiles, tile.splits)](
        x,
        out if squares is None else squares,
        weight,
        out if bias is None else bias,
        stream,
        norm_weight,
        out,
        scaled,
        sums,
        partial,
        arrivals,
        rows,
        outputs,
        depth,
        0 if squares is None else len(squares),
        eps,
        ROWS=padded(rows),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        SPLITS=tile.splits,
        PARTS=1 if squares is None else triton.next_power_of_2(len(squares)),
        SCALED=squares is not None,
        BIAS=bias is not None,
        GATED=epilogue is Epilogue.GATE,
        ADDS=addition is not None,
        **overlap(x, tile.overlaps),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def _product(
    x,
    squares,
    weight,
    bias,
    stream,
    norm_weight,
    out,
    scaled,
    sums,
    partial,
    arrivals,
    rows,
    outputs,
    depth,
    parts,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
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
    share = depth // SPLITS
    first = tl.program_id(1) * share
    for k in range(first, first + share, DEPTH):
        a = tl.load(x_at + k, mask=real, other=0.0)
        w = tl.load(weight_at + k, eviction_policy="evict_first")
        total = tl.dot(a, w, total, input_precision="ieee")
        if GATED:
            u = tl.load(up_at + k, eviction_policy="evict_first")
            up = tl.dot(a, u, up, input_precision="ieee")
    if SPLITS > 1:
        size: tl.constexpr = ROWS * COLUMNS
        inner = tile * SPLITS * size + row[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        tl.store(partial + inner + tl.program_id(1) * size, total)
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") != SPLITS - 1:
            return
        tl.store(arrivals + tile, 0)
        tl.debug_barrier()
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for other in tl.static_range(SPLITS):
            total += tl.load(partial + inner + other * size, cache_modifier=".cg")
    if SCALED:
        part = tl.arange(0, PARTS)
        found = tl.load(
            squares + part[:, None] * ROWS + row[None, :], mask=(part < parts)[:, None], other=0.0
        )
        factor = tl.rsqrt(tl.sum(found, 0) / depth + eps)
        total = total * factor[:, None]
        up = up * factor[:, None]
    if BIAS:
        total += tl.load(bias + source).to(tl.float32)[None, :]
    if GATED:
        # rounded as a product is that is written before its gate is taken: rows that come with
        # others may have been multiplied that way
        total = total.to(out.dtype.element_ty).to(tl.float32)
        up = up.to(out.dtype.element_ty).to(tl.float32)
        total = total * tl.sigmoid(total) * up
    place = row[:, None] * outputs + column[None, :]
    keep = real & inside
    if ADDS:
        before = tl.load(stream + place, mask=keep, other=0.0).to(tl.float32)
        total = total.to(out.dtype.element_ty).to(tl.float32) + before
    y = total.to(out.dtype.element_ty)
    tl.store(out + place, y, mask=keep)
    if ADDS:
        stored = tl.where(keep, y.to(tl.float32), 0.0)
        factor = tl.load(norm_weight + source).to(tl.float32)
        tl.store(scaled + place, (stored * factor[None, :]).to(out.dtype.element_ty), mask=keep)
        tl.store(sums + tile * ROWS + row, tl.sum(stored * stored, 1))


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

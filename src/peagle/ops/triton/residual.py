"""Products of few rows, with the norm before them and the addition after them in the same launch.

With few rows a product is bound by reading its weight, and every further launch costs what some
10 MB of reading take. `tiles.takes` says where they beat cuBLAS.
"""

import triton
import triton.language as tl

from peagle.ops.products.product import Epilogue
from peagle.ops.triton.launch import announce, overlap, wait
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

"""Batch-invariant products: a row's result is the same to the last bit among any number of rows.

As in `quantized_product` the weight is the left operand, so that one instruction serves any number
of rows, and how the depth is divided follows from the weight alone. Programs share a tile where
rows are few; where they are many, each takes the same parts one after the other, and adds them up
in the same order.
"""

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.launch import begin, multiprocessors, overlap
from peagle.ops.triton.product_call import gathered, left, meeting
from peagle.ops.triton.quantized_product import splits_of
from peagle.ops.triton.tiles import padded

LINES = 64
"""Lines of the weight that a program has."""
STEP_BYTES = 256
"""Bytes of a line that it reads in a step."""
MOST_ROWS = 128
"""That a program has; more are divided among programs."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias`. x: [rows, depth]; weight: [outputs, depth]."""
    (rows, depth), outputs = x.shape, len(weight)
    out = x.new_empty(rows, outputs)
    height, splits = min(padded(rows), MOST_ROWS), splits_of(outputs, depth, multiprocessors(x))
    tiles, across = triton.cdiv(outputs, LINES), triton.cdiv(rows, height)
    shared = splits > 1 and across == 1
    _product[(tiles, across, splits if shared else 1)](
        x.contiguous(),
        weight,
        out if bias is None else bias,
        out,
        *meeting(out, tiles, splits if shared else 1, LINES * height),
        rows,
        outputs,
        depth,
        ROWS=height,
        LINES=LINES,
        DEPTH=STEP_BYTES // x.element_size(),
        SPLITS=splits,
        SHARED=shared,
        BIAS=bias is not None,
        **overlap(x),
        num_warps=4,
        num_stages=3,
    )
    return out


@triton.jit
def _part(
    x_at, w_at, real, split, depth, ROWS: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """The product over one part of the depth: [LINES, ROWS]."""
    step = tl.arange(0, DEPTH)
    share = tl.cdiv(tl.cdiv(depth, DEPTH), SPLITS) * DEPTH
    total = tl.zeros([LINES, ROWS], tl.float32)
    for k in range(split * share, tl.minimum((split + 1) * share, depth), DEPTH):
        inside = step < depth - k
        lines = tl.load(w_at + k, mask=inside[None, :], other=0.0)
        rows = tl.load(x_at + k, mask=inside[:, None] & real[None, :], other=0.0)
        total = tl.dot(lines, rows, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,
    weight,
    bias,
    out,
    partial,
    arrivals,
    rows,
    outputs,
    depth,
    ROWS: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SHARED: tl.constexpr,
    BIAS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    line = tile * LINES + tl.arange(0, LINES)
    step = tl.arange(0, DEPTH)
    x_at = x + row.to(tl.int64)[None, :] * depth + step[:, None]
    kept = tl.minimum(line, outputs - 1).to(tl.int64)
    w_at = weight + kept[:, None] * depth + step[None, :]
    if SHARED:
        split = tl.program_id(2)
        place = tl.arange(0, LINES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        at = partial + tile * (SPLITS * LINES * ROWS) + place
        part = _part(x_at, w_at, real, split, depth, ROWS, LINES, DEPTH, SPLITS)
        if not left(part, at, split, arrivals, tile, SPLITS):
            return
        total = gathered(at, arrivals, tile, SPLITS)
    else:
        total = tl.zeros([LINES, ROWS], tl.float32)
        for split in range(SPLITS):
            total += _part(x_at, w_at, real, split, depth, ROWS, LINES, DEPTH, SPLITS)
    if BIAS:
        total += tl.load(bias + kept).to(tl.float32)[:, None]
    keep = real[None, :] & (line < outputs)[:, None]
    out_at = out + row.to(tl.int64)[None, :] * outputs + line[:, None]
    tl.store(out_at, total.to(out.dtype.element_ty), mask=keep)

"""What a sandwich block adds to the residual stream, the sum, and the norm after it: one launch.

A program has one row. Everything is rounded where the references round it, but for norms, which are
rounded with their weight.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.launch import begin, overlap


def add(
    product: Tensor,
    own_weight: Tensor,
    own_eps: float,
    stream: Tensor,
    scalar: Tensor | None,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """The stream with what is added, times scalar [1], and that normed: [rows, width] both."""
    total, out = torch.empty_like(stream), torch.empty_like(stream)
    rows, width = stream.shape
    block = triton.next_power_of_2(width)
    _add_normed[(rows,)](
        product,
        own_weight,
        stream,
        stream if scalar is None else scalar,
        norm_weight,
        total,
        out,
        width,
        own_eps,
        norm_eps,
        SCALAR=scalar is not None,
        BLOCK=block,
        **overlap(stream),
        num_warps=8 if block > 1024 else 4,
    )
    return total, out


@triton.jit
def _normed(value, weight, column, inside, width, eps):
    """A row [BLOCK] in float32 under a norm."""
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    return value * factor * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _add_normed(
    product,
    own_weight,
    stream,
    scalar,
    norm_weight,
    total,
    out,
    width,
    eps,
    next_eps,
    SCALAR: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    kind: tl.constexpr = total.dtype.element_ty
    given = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    given = _normed(given, own_weight, column, inside, width, eps).to(kind).to(tl.float32)
    before = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    value = (before + given).to(kind)
    if SCALAR:
        value = (value.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(kind)
    tl.store(total + at, value, mask=inside)
    under = _normed(value.to(tl.float32), norm_weight, column, inside, width, next_eps)
    tl.store(out + at, under.to(kind), mask=inside)

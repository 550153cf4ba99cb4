"""Inputs of a product rounded to FP8, in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.quantized_activations import E4M3, LARGEST, LEAST, ROWS

AT_ONCE = 2048
"""Inputs of a row that a program rounds, unless one group has more."""


def quantize(x: Tensor, group: int, run: int) -> tuple[Tensor, Tensor]:
    """As the reference: numbers and scales."""
    rows, depth = x.shape
    padded, groups = triton.cdiv(rows, ROWS) * ROWS, depth // group
    numbers = torch.empty(padded, depth, dtype=torch.uint8, device=x.device).view(E4M3)
    scales = torch.empty(groups, padded, dtype=torch.float32, device=x.device)
    width = triton.next_power_of_2(group)
    several = max(1, min(AT_ONCE // width, triton.next_power_of_2(groups)))
    _quantize[(padded, triton.cdiv(groups, several))](
        x.contiguous(),
        numbers,
        scales,
        rows,
        depth,
        padded,
        LARGEST=LARGEST,
        LEAST=LEAST,
        GROUP=group,
        WIDTH=width,
        GROUPS=several,
        RUN=run,
        num_warps=4 if several * width <= AT_ONCE else 8,
    )
    return numbers, scales.T


@triton.jit(do_not_specialize=["rows", "padded"])
def _quantize(
    x,
    numbers,
    scales,
    rows,
    depth,
    padded,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    RUN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = tl.arange(0, WIDTH)
    # of a run of 128 numbers the first two are of inputs 0 and 64, the next of 1 and 65
    source = at // RUN * RUN + at % 2 * (RUN // 2) + at % RUN // 2
    start = group * GROUP
    inside = (start < depth)[:, None] & (at < GROUP)[None, :]
    read = inside & (row < rows)
    found = tl.load(x + row * depth + start[:, None] + source[None, :], mask=read, other=0.0)
    found = found.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(found), 1), LEAST) / LARGEST
    rounded = (found / scale[:, None]).to(numbers.dtype.element_ty)
    tl.store(numbers + row * depth + start[:, None] + at[None, :], rounded, mask=inside)
    tl.store(scales + group * padded + row, scale, mask=start < depth)

"""The inputs of a product are rounded to FP8 in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.quantized_activations import ROWS, QuantizedInputs
from peagle.ops.weight import E4M3, LARGEST_E4M3, LEAST_AMAX

AT_ONCE = 2048
"""Inputs of a row that a program rounds, unless one group has more."""
LARGEST, LEAST = tl.constexpr(LARGEST_E4M3), tl.constexpr(LEAST_AMAX)


def quantize(x: Tensor, group: int, run: int) -> QuantizedInputs:
    """As the reference."""
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
        GROUP=group,
        GROUPS=several,
        RUN=run,
        num_warps=4 if several * width <= AT_ONCE else 8,
    )
    return QuantizedInputs(numbers, scales.T)


@triton.jit(do_not_specialize=["rows"])
def _quantize(
    x, numbers, scales, rows, depth, GROUP: tl.constexpr, GROUPS: tl.constexpr, RUN: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    runs: tl.constexpr = triton.next_power_of_2(GROUP) // RUN
    half: tl.constexpr = RUN // 2
    # of a run of 128 numbers the first two are of inputs 0 and 64, the next of 1 and 65
    run, pair = tl.arange(0, runs)[None, :, None], tl.arange(0, half)[None, None, :]
    start = (group * GROUP)[:, None, None]
    there = (start < depth) & (run * RUN < GROUP)
    # the comparison, always true, gives the condition the shape of all three axes
    inside = there & (pair >= 0)
    at = x + row * depth + start + run * RUN + pair
    lower = tl.load(at, mask=inside & (row < rows), other=0.0).to(tl.float32)
    upper = tl.load(at + half, mask=inside & (row < rows), other=0.0).to(tl.float32)
    largest = tl.max(tl.max(tl.maximum(tl.abs(lower), tl.abs(upper)), 2), 1)
    scale = tl.maximum(largest, LEAST) / LARGEST
    by = scale[:, None, None]
    rounded = tl.interleave(lower / by, upper / by).to(numbers.dtype.element_ty)
    place = tl.arange(0, RUN)[None, None, :]
    at = numbers + row * depth + start + run * RUN + place
    tl.store(at, rounded, mask=there & (place >= 0))
    tl.store(scales + group * tl.num_programs(0) + row, scale, mask=group * GROUP < depth)

"""Inputs of a product rounded to FP8 as they come, with a scale for each group of a row."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.triton import in_kernels
from peagle.ops.weight import E4M3, FP8, LARGEST_E4M3, LEAST_AMAX

ROWS = 16
"""Rows come in multiples of it, as products in FP8 want them."""


class QuantizedInputs(NamedTuple):
    """What a row's inputs are rounded to."""

    numbers: Tensor
    """[rows, depth] float8_e4m3fn, in the order of a weight's"""
    scales: Tensor
    """[rows, groups] float32; the scales of one group lie side by side"""


@in_kernels("quantized_activations")
def quantize(x: Tensor, group: int, run: int) -> QuantizedInputs:
    """x [rows, depth] in groups of so many inputs; rows of zeros fill up to whole `ROWS`.

    run: that of the weight, which inputs are to be multiplied by.
    """
    groups = F.pad(x.float(), (0, 0, 0, -len(x) % ROWS)).unflatten(1, (-1, group))
    scales = groups.abs().amax(dim=2, keepdim=True).clamp(min=LEAST_AMAX) / LARGEST_E4M3
    bits = (groups / scales).to(E4M3).flatten(1).view(torch.uint8)
    numbers = FP8.ordered(bits, run).view(E4M3)
    return QuantizedInputs(numbers, scales[:, :, 0].T.contiguous().T)

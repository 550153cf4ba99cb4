"""MXFP4 weights (OCP Microscaling Formats 1.0): 32 four-bit numbers share one scale."""

import torch
from torch import Tensor

from peagle.errors import InputError

BLOCK = 32
"""How many numbers share a scale."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What E2M1's lower three bits stand for; the fourth is the sign."""
LARGEST_SCALE = 252
"""With a larger scale, 6 would exceed float32's range; 255 is NaN."""


def dequantised(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights of some experts, exactly, in bfloat16 or float32.

    blocks: [experts, rows, columns / 32, 16] bytes, each with the first of its two numbers in the
    low bits; scales: [experts, rows, columns / 32], the exponent + 127. Returns [experts, rows,
    columns]. Raises `InputError` for a scale that is NaN or too large.
    """
    if bool((scales > LARGEST_SCALE).any()):
        raise InputError("MXFP4 weights hold NaN or infinite values")
    pairs = _pairs(blocks.device)
    experts, rows, groups = scales.shape
    weights = torch.empty(experts, rows, groups * BLOCK, dtype=dtype, device=blocks.device)
    # one expert at a time: the intermediates take many times the weight's bytes
    for weight, numbers, exponents in zip(weights, blocks, scales, strict=True):
        # the bits of float32's exponent; the least scale, 2**-127, becomes 0
        factors = (exponents.int() << 23).view(torch.float32)
        values = pairs[numbers.int()].flatten(-2) * factors[..., None]
        weight.copy_(values.flatten(-2))
    return weights


def _pairs(device: torch.device) -> Tensor:
    """The two numbers in each byte: [256, 2]."""
    numbers = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], device=device)
    byte = torch.arange(256, device=device)
    return torch.stack((numbers[byte % 16], numbers[byte // 16]), dim=-1)

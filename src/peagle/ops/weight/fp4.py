"""MXFP4 (OCP Microscaling Formats 1.0) and NVFP4: E2M1 numbers, some of an output share a scale.

MXFP4 has a power of two for 32, a byte that is its exponent + 127. NVFP4 has an E4M3 scale for 16,
and a float32 factor for each output.
"""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.ops.weight.integers import FourBits

LARGEST_SCALE = 127 + 64
"""Of MXFP4, as it is kept: 2 to the power of 64, what kernels have room for. 255 is NaN."""
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What E2M1's lower three bits stand for; the fourth is the sign."""
SCALES = 16
"""How many scales of an output a kernel may read in a step."""


@dataclass(frozen=True)
class FP4(FourBits):
    """E2M1. 16 bits have four numbers, 16 inputs apart in a run of 64, as `_orders` says."""

    block: int
    """Inputs that share a scale."""
    runs: ClassVar[int] = 64

    def kept(self, words: Tensor) -> Tensor:
        return _orders(words.device)[0][words]

    def plain(self, words: Tensor) -> Tensor:
        return _orders(words.device)[1][words.int() & 0xFFFF]

    def values(self, codes: Tensor) -> Tensor:
        known = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)], device=codes.device)
        return known[codes.int()]

    def widened(self, scales: Tensor) -> Tensor:
        if scales.dtype != torch.uint8:
            return scales.float()
        # the bits of float32's exponent; the least scale, 2**-127, becomes 0
        return (scales.int() << 23).view(torch.float32)

    def columns(self, scales: int, wide: int) -> int:
        return -(-scales // SCALES) * SCALES

    def refuse(self, scales: Tensor) -> None:
        if scales.dtype != torch.uint8:
            if bool((scales.float() < 0).any()):
                raise InputError(f"{self.name.upper()} weights have scales below 0")
        elif bool((scales > LARGEST_SCALE).any()):
            raise InputError("MXFP4 weights hold scales that are NaN or above 2**64")


MXFP4, NVFP4 = FP4("mxfp4", block=32), FP4("nvfp4", block=16)


@functools.cache
def _orders(device: torch.device) -> tuple[Tensor, Tensor]:
    """Where a weight has four codes of four bits in 16, and the inverse: int16 [65536].

    Given by where they lie one after the other, the first lowest. A code's sign and magnitude go to

        15, 8-6     the first: there bfloat16 has its sign, and the lowest bits of its exponent
                    beside the highest of its mantissa
        12, 5-3     the second: by a shift of three
        9, 2-0      the third: by a shift of six
        14, 11-10   the fourth, whose lowest bit is 13: what is left
    """
    given = torch.arange(1 << 16, dtype=torch.int32, device=device)
    codes = [given >> shift & 15 for shift in (0, 4, 8, 12)]
    ordered = torch.zeros_like(given)
    for code, shift in zip(codes, (0, 3, 6), strict=False):
        ordered |= ((code & 8) << 12 | (code & 7) << 6) >> shift
    last = codes[3]
    ordered |= (last & 8) << 11 | (last & 6) << 9 | (last & 1) << 13
    inverse = torch.empty_like(given).scatter_(0, ordered.long(), given)
    return ordered.to(torch.int16), inverse.to(torch.int16)

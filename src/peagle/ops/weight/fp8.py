"""FP8: E4M3 numbers in blocks of outputs and inputs that share a float32 scale.

A scale for each output is a block one high and as wide as the depth.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.ops.weight.quantized import Format, QuantizedWeight

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = torch.finfo(E4M3).max
LEAST_AMAX = 1e-12
"""What counts as the largest of numbers that are all zero."""


@dataclass(frozen=True)
class EightBits(Format):
    """Numbers of a byte.

    Of a run of 128 inputs the first and the 65th lie side by side, the second and the 66th, and so
    on. Runs have 64 inputs where a block or the depth does not hold whole runs of 128.
    """

    dtype: torch.dtype
    bits: ClassVar[int] = 8

    def run(self, depth: int, block: tuple[int, int]) -> int:
        return 64 if depth % 128 or (block[1] < depth and block[1] % 128) else 128

    def ordered(self, codes: Tensor, run: int) -> Tensor:
        return codes.unflatten(-1, (-1, 2, run // 2)).transpose(-1, -2).contiguous().flatten(-3)

    def codes(self, numbers: Tensor, run: int) -> Tensor:
        return numbers.unflatten(-1, (-1, run // 2, 2)).transpose(-1, -2).flatten(-3)

    def values(self, codes: Tensor) -> Tensor:
        return codes.contiguous().view(self.dtype).float()

    def refuse(self, scales: Tensor) -> None:
        if bool((scales.float() < 0).any()):
            raise InputError(f"{self.name.upper()} weights have scales below 0")


FP8 = EightBits("fp8", dtype=E4M3)


def fp8(weight: Tensor) -> QuantizedWeight:
    """A weight [outputs, depth] rounded to E4M3, with a scale for each output."""
    values = weight.detach().float()
    scales = values.abs().amax(dim=1, keepdim=True).clamp(min=LEAST_AMAX) / LARGEST_E4M3
    numbers = (values / scales).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(E4M3)
    return QuantizedWeight(FP8, numbers.view(torch.uint8), scales, (1, weight.shape[1]))

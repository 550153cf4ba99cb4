"""Integers of 4 and 8 bits, some of an output share a scale and maybe a code that stands for 0."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from peagle.ops.weight.fp8 import EightBits
from peagle.ops.weight.quantized import Format

RUN = 128
MIDDLE = 8
"""The code of four bits that stands for 0 where none is given."""


@dataclass(frozen=True)
class FourBits(Format):
    """Codes from 0 to 15. Of a run of 128 inputs 16 bits have four that are 32 apart, the first
    lowest: groups of 32, 64 and 128 inputs end where they do."""

    bits: ClassVar[int] = 4
    runs: ClassVar[int] = RUN

    def run(self, depth: int, block: tuple[int, int]) -> int:
        return self.runs

    def ordered(self, codes: Tensor, run: int) -> Tensor:
        first, second, third, fourth = codes.unflatten(-1, (-1, 4, run // 4)).int().unbind(-2)
        found = self.kept(first | second << 4 | third << 8 | fourth << 12)
        return found.to(torch.int16).view(torch.uint8).flatten(-2)

    def kept(self, words: Tensor) -> Tensor:
        """How 16 bits are kept that have four codes one after the other."""
        return words

    def plain(self, words: Tensor) -> Tensor:
        """The inverse of `kept`."""
        return words

    def codes(self, numbers: Tensor, run: int) -> Tensor:
        given = self.plain(numbers.view(torch.int16)).unflatten(-1, (-1, run // 4))
        codes = torch.stack([given >> shift & 15 for shift in (0, 4, 8, 12)], dim=-2)
        return codes.to(torch.uint8).flatten(-3)

    def values(self, codes: Tensor) -> Tensor:
        return codes.float() - MIDDLE

    def columns(self, scales: int, wide: int) -> int:
        of_run = max(RUN // wide, 1)
        return -(-scales // of_run) * of_run


INT4, INT8 = FourBits("int4"), EightBits("int8", dtype=torch.int8)

"""Weights in FP8: E4M3 numbers, and beside each the scales that they share."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peagle.models.formats.layout import FLOATING, Layout, Part
from peagle.models.weights import Shape
from peagle.ops.weight import E4M3, FP8, Format


@dataclass(frozen=True)
class Fp8(Layout):
    """Numbers under the weight's own name, scales under one of some others."""

    format: Format = field(default=FP8, kw_only=True)
    dynamic_activations: bool = field(default=False, kw_only=True)
    scales: tuple[str, ...] = ("weight_scale",)
    """What the scales may be called, written as the first."""
    strategy: str = "tensor"
    """What shares a scale: a "tensor", a "channel", which is an output, or a "block". Files of one
    of the first two are read as the other where their scales are those."""
    blocks: tuple[int, int] = (1, 1)
    """Outputs and inputs of a block, where blocks share scales."""

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        return {"weight": E4M3, self.scales[0]: FLOATING}

    def stored(self, name: str, names: Container[str]) -> "Fp8 | None":
        found = (scale for scale in self.scales if name + scale in names)
        return next((replace(self, scales=(scale,)) for scale in found), None)

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        *leading, outputs, depth = shape
        high, wide = self.blocks if self.strategy == "block" else (1, depth)
        return shape, (*leading, -(-outputs // high), -(-depth // wide))

    def fits(self, end: str, shape: Shape, expected: Shape) -> bool:
        """One number is as good, unless blocks share scales."""
        one = end != "weight" and math.prod(shape) == 1 and self.strategy != "block"
        return one or super().fits(end, shape, expected)

    def block(self, depth: int, sizes: Sequence[int]) -> tuple[int, int]:
        """Theirs, or one for each output where parts end within a block."""
        if self.strategy != "block":
            return 1, depth
        high, wide = self.blocks
        return (1 if any(size % high for size in sizes) else high), wide

    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        numbers, scales = tensors
        return Part(numbers.view(torch.uint8), self._spread(scales.float(), len(numbers), block[0]))

    def _spread(self, scales: Tensor, outputs: int, high: int) -> Tensor:
        """A part's scales: [blocks of `high` outputs, blocks of inputs]."""
        if self.strategy != "block":
            return scales.reshape(-1, 1).expand(outputs, 1)
        tall = self.blocks[0]
        scales = scales.view(-(-outputs // tall), -1)
        return scales if high == tall else scales.repeat_interleave(tall, 0)[:outputs]

"""Weights in MXFP4: bytes of two numbers, and a byte for the power of two that 32 of them share."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.formats.layout import Layout, Part
from peagle.models.weights import Shape
from peagle.ops.weight import MXFP4


@dataclass(frozen=True)
class Mxfp4(Layout):
    """GPT-OSS's: numbers by block."""

    label, format, scale_bytes = "MXFP4", MXFP4, 1

    @property
    def ends(self) -> tuple[str, ...]:
        return "_blocks", "_scales"

    def stored(self, name: str, names: Container[str]) -> "Mxfp4 | None":
        return self if any(name + end in names for end in self.ends) else None

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        *leading, depth = shape
        if depth % MXFP4.block:
            raise InputError(
                f"has {depth} inputs by config.json; MXFP4 packs them in whole blocks of "
                f"{MXFP4.block}"
            )
        scales = (*leading, depth // MXFP4.block)
        return (*scales, MXFP4.block // 2), scales

    def unfit(self, end: str, tensor: Tensor, expected: Shape) -> str | None:
        if tensor.dtype != torch.uint8:
            return f"is {tensor.dtype}; MXFP4 weights are bytes"
        if tensor.shape == expected:
            return None
        return f"has shape {list(tensor.shape)}, expected {list(expected)}"

    def block(self, depth: int, sizes: Sequence[int]) -> tuple[int, int]:
        return 1, MXFP4.block

    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        blocks, scales = tensors
        return Part(blocks.flatten(-2), scales)

    def written(self, part: Part, block: tuple[int, int]) -> Sequence[Tensor]:
        return part.packed.unflatten(-1, (-1, MXFP4.block // 2)), part.scales

"""Weights in MXFP4 and NVFP4: bytes of two numbers, and scales that 32 or 16 of them share."""

from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.formats.layout import FLOATING, Layout, Part
from peagle.models.weights import Shape
from peagle.ops.weight import E4M3, MXFP4, NVFP4
from peagle.ops.weight.fp4 import FP4


@dataclass(frozen=True)
class Fp4(Layout):
    """An output's numbers in a row of bytes; of NVFP4 also a factor for the whole weight."""

    format: FP4
    names: tuple[str, ...]
    """Ends of numbers, scales, and a factor where there is one."""
    by_block: bool = False
    """Whether bytes are [blocks, 16], not in a row."""
    divided: bool = False

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        scales = torch.uint8 if self.format == MXFP4 else E4M3
        return dict(zip(self.names, (torch.uint8, scales, FLOATING), strict=False))

    def stored(self, name: str, names: Container[str]) -> "Fp4 | None":
        numbers, _, *factor = self.names
        # other layouts have scales of this name, and numbers where these have a factor
        if name + (factor[0] if factor else numbers) not in names:
            return None
        if f"{name}weight_zero_point" in names:
            raise InputError(f"{name}weight_zero_point: FP4 with zero points is not supported")
        return self

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        (*leading, depth), block = shape, self.format.block
        if depth % block:
            raise InputError(
                f"has {depth} inputs by config.json; {self.label} packs them in whole blocks of "
                f"{block}"
            )
        scales = (*leading, depth // block)
        numbers = (*scales, block // 2) if self.by_block else (*leading, depth // 2)
        return (numbers, scales, (1,))[: len(self.names)]

    def fits(self, end: str, shape: Shape, expected: Shape) -> bool:
        """Several blocks may share a scale."""
        shared = end == self.names[1] and len(shape) == len(expected) and shape[-1] > 0
        return super().fits(end, shape, expected) or (
            shared and tuple(shape[:-1]) == expected[:-1] and expected[-1] % shape[-1] == 0
        )

    def others(self, outputs: int, scales: int) -> int:
        return torch.float32.itemsize * outputs if len(self.names) == 3 else 0

    def block(self, depth: int, sizes: Sequence[int]) -> tuple[int, int]:
        return 1, self.format.block

    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        numbers, scales, *factor = tensors
        packed = numbers.flatten(-2) if self.by_block else numbers
        blocks = 2 * packed.shape[-1] // self.format.block
        scales = scales.repeat_interleave(blocks // scales.shape[-1], -1)
        if not factor:
            return Part(packed, scales)
        if not bool((factor[0] > 0).all()):
            raise InputError(f"{self.names[2]} is {factor[0].item()}; it must be above 0")
        return Part(packed, scales, factors=factor[0].float().reshape(1).expand(len(scales)))


GPT_OSS = Fp4(MXFP4, ("_blocks", "_scales"), by_block=True)
MODELOPT = Fp4(NVFP4, ("weight", "weight_scale", "weight_scale_2"))
COMPRESSED = Fp4(NVFP4, ("weight_packed", "weight_scale", "weight_global_scale"), divided=True)
COMPRESSED_MXFP4 = Fp4(MXFP4, ("weight_packed", "weight_scale"))

"""Weights in integers of 4 and 8 bits, as compressed-tensors, AutoAWQ and GPTQ write them.

In memory codes are what they are in files, an output's in a row, and scales stay in their type.
"""

from abc import abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.formats.layout import FLOATING, Layout, Part
from peagle.models.weights import Shape
from peagle.ops.weight import Format
from peagle.ops.weight.integers import MIDDLE, RUN

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which four bits of 32 hold the first of eight neighbouring outputs, the second, and so on."""
SIGN = 0x80
"""What turns codes of eight bits, 128 of which stands for 0, into signed ones and back."""


@dataclass(frozen=True)
class Integers(Layout):
    """Codes in groups of inputs that share a scale, and maybe a code that stands for 0."""

    format: Format
    group: int | None = None
    """Inputs of a group; None: all of an output."""
    zeros: bool = False
    """Whether groups have zero points."""

    def __post_init__(self) -> None:
        group = self.group
        if group not in (None, 32, 64) and group % RUN:
            raise InputError(
                f"weights in groups of {group} are not supported: groups of 32, 64, 128 or one for "
                "each output"
            )

    @property
    def bits(self) -> int:
        """The bits of a code."""
        return self.format.bits

    scale_bytes = 2

    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        outputs, depth = shape
        if depth % (self.group or 8):
            raise InputError(f"has {depth} inputs by config.json, in groups of {self.group}")
        tensors = self.tensors(outputs, depth, depth // (self.group or depth), 32 // self.bits)
        return tuple(tensors[end] for end in self.ends)

    @abstractmethod
    def tensors(self, outputs: int, depth: int, groups: int, together: int) -> dict[str, Shape]:
        """Shapes by end, given how many codes are together in 32 bits."""

    def block(self, depth: int, sizes: Sequence[int]) -> tuple[int, int]:
        return 1, self.group or (max(depth, RUN) if self.bits == 4 else depth)

    def coded(self, codes: Tensor) -> Tensor:
        """Codes as ours, or the inverse."""
        return codes if self.bits == 4 else codes ^ SIGN

    def in_words(self, words: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """Codes of int32 [..., words], a byte each, the first in the lowest bits: [..., codes]."""
        places = order or range(32 // self.bits)
        mask = (1 << self.bits) - 1
        codes = [(words >> self.bits * place & mask).to(torch.uint8) for place in places]
        return torch.stack(codes, dim=-1).flatten(-2)

    def others(self, outputs: int, scales: int) -> int:
        return scales * self.zeros


@dataclass(frozen=True)
class Compressed(Integers):
    """compressed-tensors': pack-quantized in words of 32 bits, int-quantized in bytes."""

    words: bool = True

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        word = torch.int32 if self.words else torch.int8
        zeros: dict[str, torch.dtype | None] = {"weight_zero_point": word} if self.zeros else {}
        if not self.words:
            return {"weight": word, "weight_scale": FLOATING, **zeros}
        shape = {"weight_shape": torch.int64}
        return {"weight_packed": word, "weight_scale": FLOATING, **shape, **zeros}

    def stored(self, name: str, names: Container[str]) -> "Compressed | None":
        words = f"{name}weight_shape" in names
        if not words and (self.bits == 4 or f"{name}weight_scale" not in names):
            return None
        return replace(self, words=words, zeros=f"{name}weight_zero_point" in names)

    def tensors(self, outputs: int, depth: int, groups: int, together: int) -> dict[str, Shape]:
        scales = outputs, groups
        return {
            "weight": (outputs, depth),
            "weight_packed": (outputs, -(-depth // together)),
            "weight_scale": scales,
            "weight_shape": (2,),
            "weight_zero_point": (-(-outputs // together), groups) if self.words else scales,
        }

    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        given = dict(zip(self.ends, tensors, strict=True))
        numbers, scales = tensors[:2]
        zeros = given.get("weight_zero_point")
        if not self.words:
            zeros = None if zeros is None else zeros.view(torch.uint8)
            return Part(numbers.view(torch.uint8), scales, zeros)
        if zeros is not None:  # packed along outputs
            zeros = self.coded(self.in_words(zeros.mT)[:, : len(scales)].mT)
        return Part(self.coded(numbers.contiguous().view(torch.uint8)), scales, zeros)


@dataclass(frozen=True)
class Awq(Integers):
    """AutoAWQ's gemm: eight outputs in 32 bits, inputs before outputs."""

    zeros: bool = True

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        return {"qweight": torch.int32, "scales": FLOATING, "qzeros": torch.int32}

    def stored(self, name: str, names: Container[str]) -> "Awq | None":
        return self if f"{name}qweight" in names else None

    def tensors(self, outputs: int, depth: int, groups: int, together: int) -> dict[str, Shape]:
        words = -(-outputs // together)
        return {"qweight": (depth, words), "scales": (groups, outputs), "qzeros": (groups, words)}

    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        numbers, scales, zeros = tensors
        codes = self.in_words(numbers, AWQ_ORDER).mT.contiguous()
        return Part(self.format.packed(codes), scales.mT, self.in_words(zeros, AWQ_ORDER).mT)


@dataclass(frozen=True)
class Gptq(Integers):
    """GPTQ's: eight inputs, or four, in 32 bits, before outputs."""

    zeros: bool = False
    """False: all zero points are the middle."""
    less: int = 1
    """What files subtract from zero points: 0 in version 2."""
    ordered: bool = field(default=False, kw_only=True)
    """Whether the file says of which group each input is."""

    @property
    def dtypes(self) -> dict[str, torch.dtype | None]:
        order = {"g_idx": torch.int32} if self.ordered else {}
        return {"qweight": torch.int32, "scales": FLOATING, "qzeros": torch.int32, **order}

    def stored(self, name: str, names: Container[str]) -> "Gptq | None":
        found = f"{name}qweight" in names
        return replace(self, ordered=f"{name}g_idx" in names) if found else None

    def tensors(self, outputs: int, depth: int, groups: int, together: int) -> dict[str, Shape]:
        return {
            "qweight": (-(-depth // together), outputs),
            "scales": (groups, outputs),
            "qzeros": (groups, -(-outputs // together)),
            "g_idx": (depth,),
        }

    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        numbers, scales, zeros, *order = tensors
        if order:
            self.check_order(order[0])
        codes = self.in_words(zeros)[:, : scales.shape[1]] + self.less
        if not self.zeros and bool((codes != (MIDDLE if self.bits == 4 else SIGN)).any()):
            raise InputError("quantization_config says sym, and there are other zero points")
        packed = self.coded(numbers.mT.contiguous().view(torch.uint8))
        return Part(packed, scales.mT, self.coded(codes).mT if self.zeros else None)

    def check_order(self, groups: Tensor) -> None:
        """Raise `InputError` for inputs that are not in the order of their groups."""
        own = torch.arange(len(groups), device=groups.device) // (self.group or len(groups))
        if not torch.equal(groups.to(own.dtype), own):
            raise InputError(
                "inputs are in the order of their groups (g_idx); re-quantise with desc_act false "
                '(actorder "weight"); vLLM 0.33 refuses it, too'
            )

"""What every layout has, and the rule that reads a weight by one."""

import math
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from peagle.errors import InputError, about
from peagle.models.weights import Shape, TensorRule, grouped
from peagle.ops.weight import Format, QuantizedWeight, Weight

FLOATING = None


@dataclass(frozen=True)
class Part:
    """What `QuantizedWeight.of` takes, of some of the outputs."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factors: Tensor | None = None


class Layout(ABC):
    """How a file holds weights of a format: a weight X in tensors that are called X and an end."""

    format: Format
    divided: bool = False
    """Whether a file's factors divide scales."""
    dynamic_activations: bool = False
    """Whether it was made for inputs that are rounded to FP8 too, with scales found as they come:
    one for each row and block of inputs, or for each row."""

    @property
    def label(self) -> str:
        """The format's name in messages."""
        return self.format.name.upper()

    @property
    def scale_bytes(self) -> int:
        """Bytes of a scale in memory."""
        dtype = self.dtypes[self.ends[1]]
        return torch.float32.itemsize if dtype is None else dtype.itemsize

    @abstractmethod
    def stored(self, name: str, names: Container[str]) -> Self | None:
        """This layout, or the like of it that a weight `name` has in a file; None: neither."""

    @abstractmethod
    def shapes(self, shape: Shape) -> tuple[Shape, ...]:
        """Shapes of the tensors of a weight. Raises `InputError` for one that it does not hold."""

    @property
    @abstractmethod
    def dtypes(self) -> dict[str, torch.dtype | None]:
        """The tensors' types by the ends of their names: of numbers, of scales, and of the rest;
        `FLOATING`: any of 16 bits or more."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Ends of the tensors' names."""
        return tuple(self.dtypes)

    def unfit(self, end: str, tensor: Tensor, expected: Shape) -> str | None:
        """What is wrong with a tensor; None: nothing."""
        wanted = self.dtypes[end]
        if wanted is FLOATING and not tensor.is_floating_point():
            return f"is {tensor.dtype}; scales are floating-point numbers"
        if wanted is not FLOATING and tensor.dtype != wanted:
            if end == self.ends[0]:
                return (
                    f"is {tensor.dtype} and has scales, which belong to {wanted}; parts of one "
                    f"product (q, k and v; gate and up) need one format, here {self.label}"
                )
            return f"is {tensor.dtype}; {self.label} has {wanted}"
        if self.fits(end, tensor.shape, expected):
            return None
        return f"has shape {list(tensor.shape)}, expected {list(expected)}"

    def fits(self, end: str, shape: Shape, expected: Shape) -> bool:
        """Whether a tensor may have a shape: scales may come with sizes of 1 or without."""
        if end == self.ends[0]:
            return tuple(shape) == tuple(expected)
        return _without_ones(shape) == _without_ones(expected)

    @abstractmethod
    def block(self, depth: int, sizes: Sequence[int]) -> tuple[int, int]:
        """Outputs and inputs that share a scale, of a weight whose parts have so many outputs."""

    @abstractmethod
    def read(self, tensors: Sequence[Tensor], block: tuple[int, int]) -> Part:
        """A weight's tensors as ours. Raises `InputError` for what is not supported."""

    def nbytes(self, shape: Shape, sizes: Sequence[int]) -> int:
        """Bytes in memory of a weight whose parts have so many outputs."""
        *leading, depth = shape
        outputs, kind = math.prod(leading), self.format
        high, wide = self.block(depth, sizes)
        run = kind.run(depth, (high, wide))
        numbers = outputs * -(-depth // run) * run * kind.bits // 8
        scales = outputs // high * kind.columns(-(-depth // wide), wide)
        return numbers + scales * self.scale_bytes + self.others(outputs, scales)

    def others(self, outputs: int, scales: int) -> int:
        """Bytes in memory of zero points and factors, of so many outputs and scales."""
        return 0


@dataclass(frozen=True)
class PackedRule(TensorRule):
    """A weight of few bits: `theirs` are its parts' numbers, then the parts' scales, and so on.

    Parts whose scales differ are joined as they are: nothing is quantized again.
    """

    layout: Layout = field(kw_only=True)

    @classmethod
    def of(cls, rule: TensorRule, layout: Layout) -> "PackedRule":
        """The rule for the same weight in a layout."""
        theirs = tuple(stem(name) + end for end in layout.ends for name in rule.theirs)
        return cls(rule.ours, theirs, rule.sizes, rule.leading, order=rule.order, layout=layout)

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        try:
            parts = [self.layout.shapes((size, *ours[self.leading :])) for size in self.sizes]
        except InputError as error:
            raise InputError(f"{self.theirs[0]} {error}") from None
        shapes = [shape for of_end in zip(*parts, strict=True) for shape in of_end]
        return dict(zip(self.theirs, shapes, strict=True))

    def unfit(self, name: str, tensor: Tensor, expected: Shape) -> str | None:
        end = self.layout.ends[self.theirs.index(name) // len(self.sizes)]
        problem = self.layout.unfit(end, tensor, expected)
        return None if problem is None else f"{name} {problem}"

    def nbytes(self, ours: Shape, dtype: torch.dtype) -> int:
        return self.layout.nbytes(ours, self._runs)

    @property
    def _runs(self) -> tuple[int, ...]:
        """Outputs that stay together: within them are whole blocks of those that share scales."""
        groups = len(self.order)
        return (*self.sizes, sum(self.sizes) // groups) if groups else self.sizes

    def join(self, theirs: Sequence[Tensor], ours: Shape, dtype: torch.dtype | None) -> Weight:
        block, count = self.layout.block(ours[-1], self._runs), len(self.sizes)
        parts = []
        for place, scales in enumerate(self.theirs[count : 2 * count]):
            with about(scales):
                parts.append(self.layout.read(theirs[place::count], block))
                self.layout.format.refuse(parts[-1].scales)
        blocks = (*ours[:-2], -(-ours[-2] // block[0]), -1)
        return QuantizedWeight(
            self.layout.format,
            self._together(part.packed for part in parts).view(*ours[:-1], -1),
            self._together(part.scales for part in parts).view(blocks),
            block,
            self._joined((part.zeros for part in parts), blocks),
            self._joined((part.factors for part in parts), ours[:-1]),
            self.layout.divided,
            self.layout.dynamic_activations,
        )

    def _together(self, parts: Iterable[Tensor]) -> Tensor:
        return grouped(torch.cat(list(parts)), self.order)

    def _joined(self, parts: Iterable[Tensor | None], shape: Shape) -> Tensor | None:
        found = [part for part in parts if part is not None]
        return self._together(found).view(shape) if found else None


def stem(name: str) -> str:
    """How the names begin of the tensors that a weight has in few bits."""
    return name.removesuffix("weight")


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Files leave sizes of 1 out or put them in."""
    return [size for size in shape if size != 1]

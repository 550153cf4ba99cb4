"""A weight in few bits: numbers, and scales that blocks of them share."""

from abc import ABC, abstractmethod
from copy import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

STRIP = 1 << 22
"""Numbers that are widened or laid out at a time, beside the result."""


@dataclass(frozen=True)
class Format(ABC):
    """What the codes of a weight's numbers mean, and in which order they are kept.

    A *run* is as many neighbouring inputs of an output as are ordered together, so
    that those of its numbers that lie alike in 16 bits belong to neighbours.
    """

    name: str
    bits: ClassVar[int]
    """The bits of a number: 8 or 4."""

    @abstractmethod
    def run(self, depth: int, block: tuple[int, int]) -> int:
        """Inputs of a run, of a weight with so many and with such blocks."""

    @abstractmethod
    def ordered(self, codes: Tensor, run: int) -> Tensor:
        """Whole runs of codes, a byte each [..., inputs], as a weight keeps them [..., bytes]."""

    @abstractmethod
    def codes(self, numbers: Tensor, run: int) -> Tensor:
        """The inverse of `ordered`."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """What codes stand for without scales, in float32."""

    def widened(self, scales: Tensor) -> Tensor:
        """Scales in float32."""
        return scales.float()

    def columns(self, scales: int, wide: int) -> int:
        """How many scales of an output are kept where it has some, of blocks so wide."""
        return scales

    def refuse(self, scales: Tensor) -> None:  # noqa: B027 (most have room for all)
        """Raise `InputError` for scales that kernels have no room for."""

    def spread(self, packed: Tensor) -> Tensor:
        """Codes, a byte each, of bytes that have their first in the low bits."""
        if self.bits == 8:
            return packed
        return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)

    def packed(self, codes: Tensor) -> Tensor:
        """The inverse of `spread`."""
        if self.bits == 8:
            return codes
        pairs = codes.unflatten(-1, (-1, 2))
        return pairs[..., 0] | pairs[..., 1] << 4


class QuantizedWeight(nn.Module):
    """A matrix [outputs, depth], or one for each expert, in a format of few bits.

    Its tensors are kept as bytes, so that a module's `to` moves them and casts none. The depth is
    filled up to whole runs of the format by zeros.

    block: outputs and inputs that share a scale; the last blocks may be smaller.
    divided: whether scales are divided by an output's factor, not multiplied.
    dynamic_activations: whether products of many rows may round their inputs to FP8, too, with
        scales found as they come.
    """

    def __init__(
        self,
        format: Format,  # noqa: A002 (the field's word)
        packed: Tensor,
        scales: Tensor,
        block: tuple[int, int],
        zeros: Tensor | None = None,
        factors: Tensor | None = None,
        divided: bool = False,
        dynamic_activations: bool = False,
    ) -> None:
        """packed: bytes [..., outputs, depth * bits / 8], of two numbers the first in the low bits.

        scales, zeros: [..., blocks of outputs, blocks of inputs], the latter bytes;
        factors: float32 [..., outputs].
        """
        super().__init__()
        *leading, outputs, width = packed.shape
        depth = width * 8 // format.bits
        self.format, self.block, self.shape = format, block, (*leading, outputs, depth)
        self.divided, self.dynamic_activations = divided, dynamic_activations
        missing = -depth % self.run
        numbers = packed.new_empty(*leading, outputs, (depth + missing) * format.bits // 8)
        rows = max(STRIP // depth, 1)
        strips = (whole.flatten(0, -2).split(rows) for whole in (numbers, packed))
        for into, given in zip(*strips, strict=True):
            into.copy_(format.ordered(F.pad(format.spread(given), (0, missing)), self.run))
        kept = format.columns(scales.shape[-1], block[1]) - scales.shape[-1]
        scale_bytes = F.pad(scales.view(torch.uint8), (0, kept * scales.itemsize))
        if zeros is not None:
            zeros = F.pad(zeros, (0, kept))
        self._scale_dtype = scales.dtype
        stored = {"numbers": numbers, "scale_bytes": scale_bytes, "zeros": zeros}
        for name, tensor in {**stored, "factor_bytes": factors}.items():
            own = None if tensor is None else tensor.contiguous().view(torch.uint8)
            self.register_buffer(name, own, persistent=False)

    numbers: Tensor
    """[..., outputs, bytes]"""
    scale_bytes: Tensor
    zeros: Tensor | None
    """[..., outputs, blocks of inputs] bytes: the codes that stand for 0; None: as of the format"""
    factor_bytes: Tensor | None

    def __len__(self) -> int:
        """The first size, as of a tensor."""
        return self.shape[0]

    def __getitem__(self, index: int) -> "QuantizedWeight":
        """One expert's, of the same memory."""
        own = copy(self)
        own._buffers = {name: x if x is None else x[index] for name, x in self._buffers.items()}
        own.shape = self.shape[1:]
        return own

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of all that it keeps."""
        return sum(tensor.nbytes for tensor in self.buffers())

    def numel(self) -> int:
        """How many numbers it stands for."""
        return torch.Size(self.shape).numel()

    @property
    def run(self) -> int:
        """Inputs of a run."""
        return self.format.run(self.shape[-1], self.block)

    @property
    def scales(self) -> Tensor:
        """[..., blocks of outputs, blocks of inputs or more] as files have them."""
        return self.scale_bytes.view(self._scale_dtype)

    @property
    def factors(self) -> Tensor | None:
        """float32 [..., outputs] by which an output's scales are multiplied, or divided."""
        return None if self.factor_bytes is None else self.factor_bytes.view(torch.float32)

    def packed(self) -> Tensor:
        """A copy of the numbers as `of` takes them."""
        codes = self.format.codes(self.numbers, self.run)[..., : self.shape[-1]]
        return self.format.packed(codes).contiguous()

    def dense(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers themselves; exact in float32."""
        result = torch.empty(self.shape, dtype=dtype, device=self.device)
        if len(self.shape) == 3:
            for index in range(len(self)):
                result[index] = self[index].dense(dtype)
            return result
        high = self.block[0]
        step = max(STRIP // self.shape[1] // high, 1) * high
        for start in range(0, len(self), step):
            rows = slice(start, min(start + step, len(self)))
            result[rows] = self._values(rows)
        return result

    def _values(self, rows: slice) -> Tensor:
        codes = self.format.codes(self.numbers[rows], self.run)
        values = self.format.values(codes[:, : self.shape[1]])
        if self.zeros is not None:
            values -= self._spread(self.format.values(self._of(self.zeros, rows)), rows)
        scales, factors = self.format.widened(self._of(self.scales, rows)), self.factors
        if factors is not None:
            own = factors[rows, None]
            scales = scales / own if self.divided else scales * own
        return values * self._spread(scales, rows)

    def _of(self, shared: Tensor, rows: slice) -> Tensor:
        """What blocks share, of those of some outputs."""
        high = self.block[0]
        return shared[rows.start // high : -(-rows.stop // high)]

    def _spread(self, shared: Tensor, rows: slice) -> Tensor:
        """What blocks share, for every number of some outputs."""
        high, wide = self.block
        tall = shared.repeat_interleave(high, 0)[: rows.stop - rows.start]
        return tall.repeat_interleave(wide, 1)[:, : self.shape[1]]

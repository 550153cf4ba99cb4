"""Weights in FP8: E4M3 numbers, and beside each the scales that they share."""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.weights import Shape, TensorRule
from peagle.ops.weight import E4M3, Fp8Weight, Weight

PRODUCTS = ("qkv.weight", "out.weight", "gate_up.weight", "down.weight", "head.weight")
EXPERTS = (".gate_up", ".down")
"""How our names of weights end that may be in FP8: those of products, and of experts together."""


@dataclass(frozen=True)
class Fp8:
    """How a checkpoint keeps its weights in FP8."""

    scales: tuple[str, ...]
    """What the scales of `X.weight` may be called: `X.` and one of these, written as the first."""
    strategy: str
    """What shares a scale: a "tensor", a "channel", which is an output, or a "block". Files of one
    of the first two are read as the other where their scales are those."""
    block: tuple[int, int] = (1, 1)
    """Outputs and inputs of a block, where blocks share scales."""
    dynamic_activations: bool = False
    """Whether it was made for inputs that are rounded to FP8 too, with scales found as they come:
    one for each row and block of inputs, or for each row."""

    def as_stored(self, rule: TensorRule, names: Container[str]) -> TensorRule:
        """The rule for the same parameter in a file with these tensors: not all are quantized.

        Raises `InputError` for FP8 where no product reads it: in embeddings, norms and routers.
        """
        if type(rule) is not TensorRule:
            return rule
        layouts = (self._packed(rule, scale) for scale in self.scales)
        found = [each for each in layouts if any(name in names for name in each.scales)]
        if not found:
            return rule
        if not rule.ours.endswith(PRODUCTS + EXPERTS):
            raise InputError(
                f"{rule.theirs[0]} has scales; peagle reads FP8 in products of attention, MLP, "
                "experts and head alone; vLLM serves others"
            )
        return found[0]

    def as_written(self, rule: TensorRule, ours: Weight) -> TensorRule:
        """The rule by which a weight is written that is quantized, or is not."""
        return self._packed(rule, self.scales[0]) if isinstance(ours, Fp8Weight) else rule

    def _packed(self, rule: TensorRule, scale: str) -> "Fp8Rule":
        scales = (name.removesuffix("weight") + scale for name in rule.theirs)
        return Fp8Rule(rule.ours, (*rule.theirs, *scales), rule.sizes, rule.leading, kind=self)

    def scale_shape(self, outputs: int, depth: int) -> Shape:
        """The shape of a weight's scales in a file, unless all its outputs share one."""
        high, wide = self.block if self.strategy == "block" else (1, depth)
        return -(-outputs // high), -(-depth // wide)


@dataclass(frozen=True)
class Fp8Rule(TensorRule):
    """A weight in FP8. `theirs` are its parts, then the scales of each.

    Parts whose scales differ are joined as they are: nothing is quantized again.
    """

    kind: Fp8 = Fp8(("weight_scale",), "tensor")

    @property
    def scales(self) -> tuple[str, ...]:
        """Names of the parts' scales."""
        return self.theirs[len(self.sizes) :]

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        parts: list[Shape] = [(size, *ours[self.leading :]) for size in self.sizes]
        scales = [self.kind.scale_shape(size, ours[-1]) for size in self.sizes]
        return dict(zip(self.theirs, parts + scales, strict=True))

    def unfit(self, name: str, tensor: Tensor, expected: Shape) -> str | None:
        if name in self.theirs[: len(self.sizes)]:
            if tensor.dtype != E4M3:
                return f"{name} is {tensor.dtype} and has scales, which belong to {E4M3}"
            return None if tensor.shape == expected else super().unfit(name, tensor, expected)
        if not tensor.is_floating_point():
            return f"{name} is {tensor.dtype}; scales are floating-point numbers"
        if _without_ones(tensor.shape) == _without_ones(expected):
            return None
        problem = f"{name} has shape {list(tensor.shape)}, expected {list(expected)}"
        if self.kind.strategy == "block":
            return problem
        return None if tensor.numel() == 1 else f"{problem} or one number"

    def nbytes(self, ours: Shape, dtype: torch.dtype) -> int:
        numbers, (high, wide) = math.prod(ours), self._block(ours[-1])
        scales = math.prod(ours[:-1]) // high * -(-ours[-1] // wide)
        return numbers + scales * torch.float32.itemsize

    def join(self, theirs: Sequence[Tensor], ours: Shape, dtype: torch.dtype | None) -> Fp8Weight:
        parts, scales = theirs[: len(self.sizes)], theirs[len(self.sizes) :]
        block = high, _ = self._block(ours[-1])
        numbers = torch.cat([part.view(torch.uint8) for part in parts]).view(ours)
        for name, values in zip(self.scales, scales, strict=True):
            if bool((values.float() < 0).any()):
                raise InputError(f"{name}: FP8 weights have scales below 0")
        pairs = zip(scales, self.sizes, strict=True)
        joined = torch.cat([self._spread(*pair, high) for pair in pairs])
        joined = joined.view(*ours[:-2], -(-ours[-2] // high), -1)
        dynamic = self.kind.dynamic_activations
        return Fp8Weight.of(numbers.view(E4M3), joined, block, dynamic)

    def split(self, ours: Weight) -> Sequence[Tensor]:
        assert isinstance(ours, Fp8Weight)
        assert ours.block == self._block(ours.shape[-1])
        high, flat = ours.block[0], self.leading - 1
        numbers = ours.values.view(torch.uint8).flatten(0, flat).split(self.sizes)
        scales = ours.factors.flatten(0, flat).split([size // high for size in self.sizes])
        return [*(part.view(E4M3) for part in numbers), *(self._own(part, high) for part in scales)]

    def _block(self, depth: int) -> tuple[int, int]:
        """The blocks of ours: theirs, or one for each output where parts end within a block."""
        if self.kind.strategy != "block":
            return 1, depth
        high, wide = self.kind.block
        return (1 if any(size % high for size in self.sizes) else high), wide

    def _spread(self, scales: Tensor, outputs: int, high: int) -> Tensor:
        """A part's scales: [blocks of `high` outputs, blocks of inputs]."""
        values = scales.float()
        if self.kind.strategy != "block":
            return values.reshape(-1, 1).expand(outputs, 1)
        tall = self.kind.block[0]
        values = values.view(-(-outputs // tall), -1)
        return values if high == tall else values.repeat_interleave(tall, 0)[:outputs]

    def _own(self, scales: Tensor, high: int) -> Tensor:
        """The inverse of `_spread`: of scales that it repeated the first."""
        if self.kind.strategy == "block":
            return scales[:: self.kind.block[0] // high]
        shared = self.kind.strategy == "tensor" and bool((scales == scales[0]).all())
        return scales[:1] if shared else scales


def _without_ones(shape: Sequence[int]) -> list[int]:
    """Files leave sizes of 1 out or put them in."""
    return [size for size in shape if size != 1]

"""The experts in GPT-OSS's files: one tensor for all of a layer, plain or in MXFP4."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.decoder import DecoderConfig
from peagle.models.mxfp4 import BLOCK, dequantised
from peagle.models.weights import Shape, TensorRule


@dataclass(frozen=True)
class ExpertRule(TensorRule):
    """A weight or bias of all experts; a weight has its inputs before its outputs."""

    alternating: bool = False
    """Whether theirs alternates outputs of gate and up; ours has all of gate before all of up."""

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        experts, *rest = ours
        return {self.theirs[0]: (experts, *reversed(rest))}

    def join(self, theirs: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
        value = theirs[0].to(dtype=dtype)
        return self._sorted(value.mT if value.ndim == 3 else value)

    def split(self, ours: Tensor) -> Sequence[Tensor]:
        if self.alternating:
            ours = ours.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return (ours.mT if ours.ndim == 3 else ours,)

    def packed(self, names: Container[str]) -> "ExpertRule":
        """The rule for the same weight in MXFP4, if a file with these tensors stores it so."""
        blocks, scales = (f"{self.theirs[0]}_{part}" for part in ("blocks", "scales"))
        if blocks not in names:
            return self
        return PackedRule(self.ours, (blocks, scales), self.sizes, 1, self.alternating)

    def _sorted(self, value: Tensor) -> Tensor:
        """Outputs [experts, outputs, ...] in our order."""
        if self.alternating:
            value = value.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return value.contiguous()


@dataclass(frozen=True)
class PackedRule(ExpertRule):
    """The same weight in MXFP4: blocks and their scales, outputs before inputs."""

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        experts, outputs, inputs = ours
        scales = (experts, outputs, inputs // BLOCK)
        blocks, names = (*scales, BLOCK // 2), self.theirs
        return dict(zip(names, (blocks, scales), strict=True))

    def join(self, theirs: Sequence[Tensor], dtype: torch.dtype | None) -> Tensor:
        for name, part in zip(self.theirs, theirs, strict=True):
            if part.dtype != torch.uint8:
                raise InputError(f"{name} is {part.dtype}; MXFP4 weights are bytes")
        blocks, scales = theirs
        return self._sorted(dequantised(blocks, scales, dtype or torch.bfloat16))


def expert_rules(config: DecoderConfig, ours: str, theirs: str) -> list[TensorRule]:
    """The router of a layer and its experts."""
    sizes = (config.num_experts,)

    def rule(name: str, source: str, alternating: bool) -> TensorRule:
        return ExpertRule(f"{ours}.{name}", (f"{theirs}.experts.{source}",), sizes, 1, alternating)

    return [
        TensorRule(f"{ours}.router", (f"{theirs}.router.weight",), sizes),
        TensorRule(f"{ours}.router_bias", (f"{theirs}.router.bias",), sizes),
        rule("gate_up", "gate_up_proj", True),
        rule("gate_up_bias", "gate_up_proj_bias", True),
        rule("down", "down_proj", False),
        rule("down_bias", "down_proj_bias", False),
    ]


def as_stored(rules: Iterable[TensorRule], names: Container[str]) -> list[TensorRule]:
    """The rules for a file with these tensors, in which some weights may be in MXFP4."""
    return [rule.packed(names) if isinstance(rule, ExpertRule) else rule for rule in rules]

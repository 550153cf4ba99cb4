"""GPT-OSS: sinks, windows in some layers, and experts that files hold together, often in MXFP4."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.models.families import config, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place
from peagle.models.formats.fp4 import GPT_OSS
from peagle.models.formats.layout import PackedRule
from peagle.models.spec import DecoderSpec, ExpertsSpec, LayerSpec
from peagle.models.weights import Shape, TensorRule
from peagle.ops.moe import ALPHA
from peagle.ops.weight import Weight, dense

PERIOD = 2
"""Every other layer attends to all positions, where a configuration does not say which."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = config.with_usual(values, config.USUAL["gpt_oss"])
    attention = replace(config.attention(values), sinks=True)
    experts, norms = _experts(values), config.norms(values)
    [width] = config.sizes(values, "sliding_window")
    windows = config.windows(values, config.layer_types(values, PERIOD), width)
    layers = [LayerSpec(replace(attention, window=each), experts, norms) for each in windows]
    return config.decoder(values, layers, formats=("mxfp4",))


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer."""
    experts = spec.feed_forward
    assert isinstance(experts, ExpertsSpec)
    count = (experts.num_experts,)

    def rule(ours: str, theirs: str, alternating: bool) -> TensorRule:
        names = (f"{place.theirs}.mlp.experts.{theirs}",)
        own = ExpertRule(f"{place.ours}.mlp.{ours}", names, count, alternating=alternating)
        return replace(own, layouts=(own.packed(),))

    return [
        *tensors.layer_norms(spec.norms, hidden_size, place),
        *tensors.attention(spec.attention, hidden_size, place),
        place.rule("attention.sinks", ("self_attn.sinks",), (spec.attention.num_heads,)),
        place.rule("mlp.router", ("mlp.router.weight",), count),
        place.rule("mlp.router_bias", ("mlp.router.bias",), count),
        rule("gate_up", "gate_up_proj", True),
        rule("gate_up_bias", "gate_up_proj_bias", True),
        rule("down", "down_proj", False),
        rule("down_bias", "down_proj_bias", False),
    ]


def _experts(values: Values) -> ExpertsSpec:
    limit = config.above_zero(values, "swiglu_limit", 7.0)
    if values.get("swiglu_alpha", ALPHA) != ALPHA:
        raise InputError(f"swiglu_alpha {values['swiglu_alpha']} is not {ALPHA}")
    return config.experts(
        values, "num_local_experts", width="intermediate_size", swiglu_limit=limit
    )


@dataclass(frozen=True)
class ExpertRule(TensorRule):
    """A weight or bias of all experts; a weight has its inputs before its outputs."""

    alternating: bool = False
    """Whether theirs alternates outputs of gate and up; ours has all of gate before all of up."""

    def shapes(self, ours: Shape) -> dict[str, Shape]:
        experts, *rest = ours
        return {self.theirs[0]: (experts, *reversed(rest))}

    def join(self, theirs: Sequence[Tensor], ours: Shape, dtype: torch.dtype | None) -> Weight:
        value = theirs[0].to(dtype=dtype)
        return self.sorted(value.mT if value.ndim == 3 else value)

    def split(self, ours: Weight) -> Sequence[Tensor]:
        value = self.unsorted(dense(ours))
        return (value.mT if value.ndim == 3 else value,)

    def packed(self) -> "PackedExpertRule":
        """The rule for the same weight in MXFP4."""
        names = tuple(self.theirs[0] + end for end in GPT_OSS.ends)
        return PackedExpertRule(self.ours, names, self.sizes, layout=GPT_OSS, rule=self)

    def unsorted(self, value: Tensor) -> Tensor:
        """Outputs [experts, outputs, ...] in theirs."""
        if not self.alternating:
            return value
        return value.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)

    def sorted(self, value: Tensor) -> Tensor:
        """Outputs [experts, outputs, ...] in our order."""
        if self.alternating:
            value = value.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
        return value.contiguous()


@dataclass(frozen=True)
class PackedExpertRule(PackedRule):
    """The same weight in MXFP4: outputs before inputs."""

    rule: ExpertRule = field(kw_only=True)

    def join(self, theirs: Sequence[Tensor], ours: Shape, dtype: torch.dtype | None) -> Weight:
        return super().join([self.rule.sorted(part) for part in theirs], ours, dtype)


FAMILY = Family("gpt_oss", "GptOssForCausalLM", spec, layer)

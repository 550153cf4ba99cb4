"""The language model of Qwen3.5, 3.6 and 3.8: gated delta nets, and gated attention in every fourth
layer. Published with a tower for images, which is left out; their own head for drafts (`mtp.`) is
read apart."""

import warnings
from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config
from peagle.models.families.config import FULL, Values
from peagle.models.families.family import Family
from peagle.models.spec import AttentionSpec, DecoderSpec, FeedForwardSpec, LayerSpec, NormSpec
from peagle.ops.delta_net import DeltaHeads

LINEAR = "linear_attention"
GATES = (None, "silu", "swish")
DELTA_KEYS = "num_key_heads num_value_heads key_head_dim value_head_dim conv_kernel_dim"
"""Keys of `DeltaHeads`, in its order."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    return of_layers(values, config.mlp(values))


def of_layers(values: Values, fed: FeedForwardSpec) -> DecoderSpec:
    """The decoder whose layers feed forward so."""
    values = config.with_usual(values, config.usual("qwen3_5_text"))
    _refuse_unsupported(values)
    attention = config.attention(values, partly_rotated=True)
    mixers: dict[str, AttentionSpec | DeltaHeads] = {
        FULL: replace(attention, qk_norm=True, gated=True),
        LINEAR: _delta_heads(values),
    }
    norms = NormSpec(config.norms(values).eps, offset=1.0)
    layers = [LayerSpec(mixers[kind], fed, norms) for kind in _layer_types(values)]
    return replace(config.decoder(values, layers), norm=norms)


def _layer_types(values: Values) -> list[str]:
    [interval], count = config.sizes(values, "full_attention_interval"), config.num_layers(values)
    types = config.layer_types(values, interval, LINEAR)
    if other := set(types) - {LINEAR, FULL}:
        raise InputError(f"layers of type {', '.join(sorted(other))} are not supported")
    if len(types) != count:
        raise InputError(f"layer_types names {len(types)} of {count} layers")
    return types


def _delta_heads(values: Values) -> DeltaHeads:
    heads = DeltaHeads(*config.sizes(values, *(f"linear_{name}" for name in DELTA_KEYS.split())))
    if heads.num_value_heads % heads.num_key_heads:
        raise InputError(
            f"{heads.num_value_heads} value heads cannot share {heads.num_key_heads} key heads "
            "of the linear attention evenly"
        )
    return heads


def _refuse_unsupported(values: Values) -> None:
    if values.get("output_gate_type") not in GATES:
        raise InputError(
            f"output_gate_type {values['output_gate_type']} is not supported, only swish; vLLM "
            "serves others"
        )
    if values.get("attn_output_gate", True) is False:
        raise InputError("attn_output_gate false is not supported; vLLM serves it")
    state = values.get("mamba_ssm_dtype", "float32")
    if state not in (None, "float32"):
        warnings.warn(
            f"mamba_ssm_dtype is {state}; states are kept in float32, without which drafts would "
            "change the text",
            stacklevel=2,
        )


FAMILY = Family("qwen3_5_text", "Qwen3_5ForCausalLM", spec, ignored=("mtp.", "model.visual."))
PUBLISHED = FAMILY.within(
    "qwen3_5", "Qwen3_5ForConditionalGeneration", prefix="model.language_model"
)

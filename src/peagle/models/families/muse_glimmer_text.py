"""Muse Glimmer's language model: sandwich blocks with gated attention. Every fourth layer, counted
from the last, attends to all positions and is told none of them; the others have windows. Published
with a tower for images, which is left out."""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, gemma4_text, tensors
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place
from peagle.models.spec import DecoderSpec, LayerSpec, NormSpec, SandwichSpec
from peagle.models.weights import TensorRule
from peagle.ops.rope import NOPE

PERIOD = 4


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = config.with_usual(values, config.usual("muse_glimmer_text"))
    if values.get("attention_bias"):
        raise InputError("attention_bias is not supported; vLLM serves it")
    eps, added = config.norms(values).eps, config.norms(values, "post_norm_eps").eps
    block = config.mlp(values), SandwichSpec(eps, offset=1.0, added_eps=added)
    full = [place % PERIOD == 0 for place in reversed(range(config.num_layers(values)))]
    types = values.get("layer_types") or [FULL if each else SLIDING for each in full]
    windows = config.windows(values, types, config.window(values, None))
    turned = values.get("layer_rope_theta") or [not each for each in full]
    if len(turned) != len(full):
        raise InputError(f"layer_rope_theta names {len(turned)} of {len(full)} layers")
    attention = replace(config.attention(values), qk_norm=True, gated=True)
    scale = attention.head_dim**-0.5 * config.above_zero(values, "qk_scale_factor")
    layers = [
        LayerSpec(
            replace(attention, window=window, scale=scale, rope=attention.rope if turns else NOPE),
            *block,
        )
        for window, turns in zip(windows, turned, strict=True)
    ]
    return replace(
        config.decoder({**values, "hidden_act": values["hidden_activation"]}, layers),
        norm=NormSpec(eps),
        embedding_norm=True,
        logit_scale=config.above_zero(values, "output_multiplier"),
        logit_softcap=gemma4_text.softcap(values),
    )


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer: gates have a product of their own, and QK norms no weight."""
    heads = spec.attention
    parts = tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "gate"))
    sizes = (heads.width, heads.kv_width, heads.kv_width, heads.width)
    [qkv] = place.linear("attention.qkv", parts, sizes, bias=False)
    norm = place.rule("attention.qk_norm.weight", (), ())
    return tensors.replaced(tensors.layer(spec, hidden_size, place), (qkv, norm))


PUBLISHED = Family("muse_glimmer_text", "MuseGlimmerTextModel", spec, layer).within(
    "muse_glimmer",
    "MuseGlimmerForConditionalGeneration",
    prefix="model.language_model",
    ignored=("model.vision_tower.", "model.vision_adapter.", "model.vision_projection."),
)

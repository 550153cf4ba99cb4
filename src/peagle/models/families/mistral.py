"""Mistral's families: Llama's layers.

Mistral: all of them with the same window where the configuration has one. Ministral: some of them
without a window. Ministral 3: turned by YaRN, with queries that grow in steps with their position.
Mistral Small 3.1 and Ministral 3 as they are published: a language model of either kind, with a
tower for images, which is left out.
"""

import math
from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.spec import AttentionSpec, DecoderSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {**config.usual("mistral"), **values}
    return config.alike(values, _attention(values))


def _attention(values: Values) -> AttentionSpec:
    """Every layer's. Raises `InputError` for windows in some layers alone."""
    width = config.window(values, None)
    usual = FULL if width is None else SLIDING
    if any(kind != usual for kind in values.get("layer_types") or ()):
        raise InputError(
            f"layer_types beside sliding_window {width} are not supported but where all are "
            f"{usual}: transformers does not read them of a Mistral, vLLM does"
        )
    return replace(config.attention(values), window=width)


def ministral(values: Values) -> DecoderSpec:
    """Ministral's."""
    values = {**config.usual("ministral"), **values}
    width = config.window(values, None)
    usual = [FULL if width is None else SLIDING] * config.num_layers(values)
    windows = config.windows(values, values.get("layer_types") or usual, width)
    attention = config.attention(values)
    return config.dense(values, [replace(attention, window=each) for each in windows])


def ministral3(values: Values) -> DecoderSpec:
    """Ministral 3's."""
    usual = config.usual("ministral3")
    given = values.get("rope_scaling") or values.get("rope_parameters")
    rope: Values = given or usual["rope_parameters"]
    values = {**usual, **values, "rope_parameters": rope}
    attention, beta = _attention(values), float(rope.get("llama_4_scaling_beta") or 0.0)
    if not 0 <= beta < math.inf:
        raise InputError(f"llama_4_scaling_beta is {beta}; it must be a number from 0 on")
    turned = replace(attention.rope, llama_4_scaling_beta=beta)
    return config.alike(values, replace(attention, rope=turned))


def published(values: Values) -> DecoderSpec:
    """Those of a `config.json` that has a text model's within."""
    inner = config.text(values)
    kind = inner.get("model_type", "mistral")
    if kind not in KINDS:
        raise InputError(f"a text_config of model_type {kind} is not supported")
    return KINDS[kind].spec(inner)


FAMILY = Family("mistral", "MistralForCausalLM", spec)
MINISTRAL = Family("ministral", "MinistralForCausalLM", ministral)
MINISTRAL3 = Family("ministral3", "Ministral3ForCausalLM", ministral3)
KINDS = {family.model_type: family for family in (FAMILY, MINISTRAL3)}
PUBLISHED = Family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    published,
    prefix="language_model.model",
    ignored=("vision_tower.", "multi_modal_projector."),
)

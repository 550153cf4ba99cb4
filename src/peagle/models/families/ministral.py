"""Ministral: Mistral's layers, some of them without a window."""

from dataclasses import replace

from peagle.models.families import config, mistral, tensors
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {**mistral.USUAL, **values}
    width = config.window(values, mistral.WINDOW)
    usual = [FULL if width is None else SLIDING] * config.num_layers(values)
    windows = config.windows(values, values.get("layer_types") or usual, width)
    attention = config.attention(values)
    return config.dense(values, [replace(attention, window=each) for each in windows])


FAMILY = Family("ministral", "MinistralForCausalLM", spec, tensors.dense_layer)

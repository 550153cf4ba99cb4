"""Mistral: Llama's layers, all of them with the same window where the configuration has one."""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, tensors
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.spec import AttentionSpec, DecoderSpec

USUAL: Values = {"max_position_embeddings": 131_072, "num_key_value_heads": 8}
"""What transformers takes where a configuration says nothing."""
WINDOW = 4096
"""Width where none is given; with null there are no windows."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {**USUAL, **values}
    return config.dense(values, [attention(values)] * config.num_layers(values))


def attention(values: Values) -> AttentionSpec:
    """Every layer's. Raises `InputError` for windows in some layers alone."""
    width = config.window(values, WINDOW)
    usual = FULL if width is None else SLIDING
    if any(kind != usual for kind in values.get("layer_types") or ()):
        raise InputError(
            f"layer_types beside sliding_window {width} are not supported but where all are "
            f"{usual}: transformers does not read them of a Mistral, vLLM does"
        )
    return replace(config.attention(values), window=width)


FAMILY = Family("mistral", "MistralForCausalLM", spec, tensors.dense_layer)

"""Qwen2 and Qwen2.5: Llama's layers with biases of q, k and v, and windows as Qwen3 has them."""

from dataclasses import replace

from peagle.models.families import config, qwen3, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {"max_position_embeddings": qwen3.POSITIONS, **values}
    attention = replace(config.attention(values), bias=True, out_bias=False)
    windows = qwen3.windows(values)
    return config.dense(values, [replace(attention, window=each) for each in windows])


FAMILY = Family("qwen2", "Qwen2ForCausalLM", spec, tensors.dense_layer)

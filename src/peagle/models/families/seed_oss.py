"""Seed-OSS: Llama's layers with biases of q, k and v, and of the output where it is asked for."""

from dataclasses import replace

from peagle.models.families import config, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec

USUAL: Values = {
    "attention_bias": True,
    "attention_out_bias": False,
    "head_dim": 128,
    "max_position_embeddings": 524_288,
}
"""What transformers takes where a configuration says nothing."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {**USUAL, **values}
    attention = replace(config.attention(values), out_bias=bool(values["attention_out_bias"]))
    return config.dense(values, [attention] * config.num_layers(values))


FAMILY = Family("seed_oss", "SeedOssForCausalLM", spec, tensors.dense_layer)

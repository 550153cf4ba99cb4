"""Ministral 3's language model by itself: Mistral's layers, turned by YaRN, whose queries grow in
steps with their position."""

import math
from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, mistral, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec

USUAL: Values = {
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
}
"""What transformers takes where a configuration says nothing."""
ROPE: Values = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The same of its rotation."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    rope: Values = values.get("rope_scaling") or values.get("rope_parameters") or ROPE
    values = {**USUAL, **values, "rope_parameters": rope}
    attention, beta = mistral.attention(values), float(rope.get("llama_4_scaling_beta") or 0.0)
    if not 0 <= beta < math.inf:
        raise InputError(f"llama_4_scaling_beta is {beta}; it must be a number from 0 on")
    turned = replace(attention.rope, llama_4_scaling_beta=beta)
    return config.dense(values, [replace(attention, rope=turned)] * config.num_layers(values))


FAMILY = Family("ministral3", "Ministral3ForCausalLM", spec, tensors.dense_layer)

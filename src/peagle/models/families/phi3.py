"""Phi-3 and Phi-4: Llama's layers, whose files hold q, k and v as one, and gate and up. Some rotate
a part of each head, and reach long contexts by longrope."""

from dataclasses import replace

from peagle.models.families import config, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec

USUAL: Values = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
"""What transformers takes where a configuration says nothing."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {**USUAL, **values}
    width, attention = config.window(values, None), config.attention(values, partly_rotated=True)
    if width is not None and width < int(values["max_position_embeddings"]):
        attention = replace(attention, window=width)  # else no context outgrows it
    return config.dense(values, [attention] * config.num_layers(values))


FAMILY = Family("phi3", "Phi3ForCausalLM", spec, tensors.fused_layer)

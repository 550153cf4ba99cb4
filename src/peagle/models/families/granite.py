"""Granite: Llama's layers with a number for each of embeddings, scores, what layers add, and logits
to be multiplied or divided by."""

import math
from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    added = _factor(values, "residual_multiplier")
    attention = config.attention(values)
    attention = replace(attention, scale=_factor(values, "attention_multiplier"))
    eps = config.norms(values).eps / added**2
    layers = [attention] * config.num_layers(values)
    return replace(
        config.dense({**values, "rms_norm_eps": eps}, layers),
        embedding_scale=_factor(values, "embedding_multiplier") / added,
        residual_multiplier=added,
        logit_scale=1 / _factor(values, "logits_scaling"),
    )


def _factor(values: Values, name: str) -> float:
    factor = float(values.get(name, 1.0))
    if not 0 < factor < math.inf:
        raise InputError(f"{name} is {factor}; it must be a number above 0")
    return factor


FAMILY = Family("granite", "GraniteForCausalLM", spec, tensors.dense_layer)

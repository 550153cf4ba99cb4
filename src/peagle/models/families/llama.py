"""Llama: layers that are all alike, with a dense MLP. Drafters of its style read as it does."""

from peagle.models.families import config
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    config.refuse_windows(values)
    return config.alike(values, config.attention(values))


FAMILY = Family("llama", "LlamaForCausalLM", spec)

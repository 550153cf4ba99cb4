"""Qwen2, Qwen2.5 and Qwen3: Llama's layers, some with windows; with biases of q, k and v, and since
Qwen3 with QK norm instead. Drafters of its style read as it does."""

from dataclasses import replace

from peagle.models.families import config
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import AttentionSpec, DecoderSpec

POSITIONS = 32_768
"""Where a configuration does not say them."""
WINDOW = 4096
"""Width where windows are turned on and none is given."""
HEAD_DIM = 128
"""Qwen3's, where none is given."""


def qwen2(values: Values) -> DecoderSpec:
    """What the values of a `config.json` of Qwen2 mean."""
    values = {"max_position_embeddings": POSITIONS, **values}
    return _windowed(values, replace(config.attention(values), bias=True, out_bias=False))


def spec(values: Values) -> DecoderSpec:
    """The same of Qwen3."""
    values = {"max_position_embeddings": POSITIONS, "head_dim": HEAD_DIM, **values}
    return _windowed(values, replace(config.attention(values), qk_norm=True))


def _windowed(values: Values, attention: AttentionSpec) -> DecoderSpec:
    return config.dense(values, [replace(attention, window=each) for each in windows(values)])


def window(values: Values) -> int | None:
    """Width of the windows; None where `use_sliding_window` does not turn them on."""
    return config.window(values, WINDOW) if values.get("use_sliding_window") else None


def windows(values: Values) -> list[int | None]:
    """Each layer's; without `layer_types`, only layers from `max_window_layers` on have one."""
    full = int(values.get("max_window_layers", 28))
    count = config.num_layers(values)
    types = [config.FULL if layer < full else config.SLIDING for layer in range(count)]
    return config.windows(values, values.get("layer_types") or types, window(values))


QWEN2 = Family("qwen2", "Qwen2ForCausalLM", qwen2)
FAMILY = Family("qwen3", "Qwen3ForCausalLM", spec)

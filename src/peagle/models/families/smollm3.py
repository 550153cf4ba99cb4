"""SmolLM3: Llama's layers, of which every fourth is told no positions (NoPE)."""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, tensors
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec
from peagle.ops.rope import NOPE

ROPE_THETA = 2e6
USUAL: Values = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
"""What transformers takes where a configuration says nothing."""


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = {**USUAL, **values}
    rotated = _rotated(values)
    width = config.window(values, None) if values.get("use_sliding_window") else None
    usual = [FULL if turns else SLIDING for turns in rotated]
    windows = config.windows(values, values.get("layer_types") or usual, width)
    attention = config.attention(values, ROPE_THETA)
    return config.dense(
        values,
        [
            replace(attention, window=window, rope=attention.rope if turns else NOPE)
            for turns, window in zip(rotated, windows, strict=True)
        ],
    )


def _rotated(values: Values) -> list[bool]:
    """Whether each layer rotates; `no_rope_layers` has a 1 for those that do."""
    count, step = config.num_layers(values), int(values.get("no_rope_layer_interval", 4))
    given = values.get("no_rope_layers") or [(i + 1) % step for i in range(count)]
    if len(given) < count:
        raise InputError(f"no_rope_layers names {len(given)} of {count} layers")
    return [bool(turns) for turns in given[:count]]


FAMILY = Family("smollm3", "SmolLM3ForCausalLM", spec, tensors.dense_layer)

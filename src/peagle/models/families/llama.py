"""Llama, whose layers are all alike with a dense MLP, and families whose layers are Llama's but for
what is said here. Drafters of Llama's style read as it does.

Seed-OSS: biases of q, k and v, and of the output where it is asked for. Phi-3 and Phi-4: files hold
q, k and v as one, and gate and up; some rotate a part of each head, and reach long contexts by
longrope. SmolLM3: every fourth layer is told no positions (NoPE). Granite: a number for each of
embeddings, scores, what layers add, and logits to be multiplied or divided by.
"""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, tensors
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec
from peagle.ops.rope import NOPE


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` of Llama mean."""
    config.refuse_windows(values)
    return config.alike(values, config.attention(values))


def seed_oss(values: Values) -> DecoderSpec:
    """The same of Seed-OSS; and so on."""
    values = {**config.usual("seed_oss"), **values}
    out_bias = bool(values["attention_out_bias"])
    return config.alike(values, replace(config.attention(values), out_bias=out_bias))


def phi3(values: Values) -> DecoderSpec:
    """Phi-3's and Phi-4's."""
    values = {**config.usual("phi3"), **values}
    width, attention = config.window(values, None), config.attention(values, partly_rotated=True)
    if width is not None and width < int(values["max_position_embeddings"]):
        attention = replace(attention, window=width)  # else no context outgrows it
    return config.alike(values, attention)


def smollm3(values: Values) -> DecoderSpec:
    """SmolLM3's."""
    values = {**config.usual("smollm3"), **values}
    rotated = _rotated(values)
    width = config.window(values, None) if values.get("use_sliding_window") else None
    usual = [FULL if turns else SLIDING for turns in rotated]
    windows = config.windows(values, values.get("layer_types") or usual, width)
    attention = config.attention(values)
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


def granite(values: Values) -> DecoderSpec:
    """Granite's."""
    names = "residual_multiplier", "attention_multiplier", "embedding_multiplier", "logits_scaling"
    added, scale, embedded, logits = (config.above_zero(values, name, 1.0) for name in names)
    eps = config.norms(values).eps / added**2
    attention = replace(config.attention(values), scale=scale)
    return replace(
        config.alike({**values, "rms_norm_eps": eps}, attention),
        embedding_scale=embedded / added,
        residual_multiplier=added,
        logit_scale=1 / logits,
    )


FAMILY = Family("llama", "LlamaForCausalLM", spec)
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", seed_oss)
PHI3 = Family("phi3", "Phi3ForCausalLM", phi3, tensors.fused_layer)
SMOLLM3 = Family("smollm3", "SmolLM3ForCausalLM", smollm3)
GRANITE = Family("granite", "GraniteForCausalLM", granite)

"""Gemma 3's language model: sandwich blocks, and windows in most layers, which have a rotation of
their own. Published from 4B on with a tower for images, which is left out."""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, gemma4_text
from peagle.models.families.config import FULL, SLIDING, Values
from peagle.models.families.family import Family
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, NormSpec, SandwichSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    values = config.with_usual(values, config.usual("gemma3_text"))
    gemma4_text.refuse_other_attention(values)
    if values.get("attn_logit_softcapping"):
        raise InputError("attn_logit_softcapping is not supported; vLLM serves it")
    mlp, eps = replace(config.mlp(values), activation="gelu_tanh"), config.norms(values).eps
    types = config.layer_types(values, int(values["sliding_window_pattern"]))
    windows = config.windows(values, types, config.window(values, None))
    norms = SandwichSpec(eps, offset=1.0)
    layers = [LayerSpec(_attention(values, window), mlp, norms) for window in windows]
    return replace(
        config.decoder(values, layers),
        norm=NormSpec(eps, offset=1.0),
        embedding_scale=int(values["hidden_size"]) ** 0.5,
        logit_softcap=gemma4_text.softcap(values),
    )


def _attention(values: Values, window: int | None) -> AttentionSpec:
    """A layer's, by whether it has a window."""
    scale = config.above_zero(values, "query_pre_attn_scalar")
    kind, base = (FULL, "rope_theta") if window is None else (SLIDING, "rope_local_base_freq")
    own = (values.get("rope_parameters") or {}).get(kind) or {}  # as transformers 5 writes it
    scaling = (window is None and values.get("rope_scaling")) or {}  # of full layers alone
    rope = {"rope_theta": values[base], "rope_parameters": {**own, **scaling}}
    plain = {key: value for key, value in values.items() if not key.startswith("rope")}
    return replace(
        config.attention({**plain, **rope}), window=window, qk_norm=True, scale=scale**-0.5
    )


FAMILY = Family("gemma3_text", "Gemma3ForCausalLM", spec)
PUBLISHED = FAMILY.within(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    prefix="language_model.model",
    ignored=("vision_tower.", "multi_modal_projector."),
)

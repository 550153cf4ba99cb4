"""Mistral Small 3.1 and Ministral 3 as they are published: a language model of either kind, with a
tower for images, which is left out."""

from peagle.errors import InputError
from peagle.models.families import config, ministral3, mistral, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec

KINDS = {family.model_type: family for family in (mistral.FAMILY, ministral3.FAMILY)}


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    inner = config.text(values)
    kind = inner.get("model_type", "mistral")
    if kind not in KINDS:
        raise InputError(f"a text_config of model_type {kind} is not supported")
    return KINDS[kind].spec(inner)


FAMILY = Family(
    "mistral3",
    "Mistral3ForConditionalGeneration",
    spec,
    tensors.dense_layer,
    prefix="language_model.model",
    ignored=("vision_tower.", "multi_modal_projector."),
)

"""Mistral Small 3.1 and Ministral 3 as they are published: a language model of either kind, with a
tower for images, which is left out."""

from peagle.errors import InputError
from peagle.models.families import config, ministral3, mistral, tensors
from peagle.models.families.config import Values
from peagle.models.spec import DecoderSpec

MODEL_TYPE = "mistral3"
ARCHITECTURE = "Mistral3ForConditionalGeneration"
PREFIX = "language_model.model"
IGNORED = ("vision_tower.", "multi_modal_projector.")
layer = tensors.dense_layer


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    inner = config.text(values)
    match inner.get("model_type", mistral.MODEL_TYPE):
        case mistral.MODEL_TYPE:
            return mistral.spec(inner)
        case ministral3.MODEL_TYPE:
            return ministral3.spec(inner)
        case other:
            raise InputError(f"a text_config of model_type {other} is not supported")

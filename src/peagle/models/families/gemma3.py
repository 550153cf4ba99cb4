"""Gemma 3 as it is published from 4B on: a language model, `gemma3_text`, with a tower for images,
which is left out."""

from peagle.models.families import config, gemma3_text
from peagle.models.families.config import Values
from peagle.models.spec import DecoderSpec

MODEL_TYPE = "gemma3"
ARCHITECTURE = "Gemma3ForConditionalGeneration"
PREFIX = "language_model.model"
IGNORED = ("vision_tower.", "multi_modal_projector.")
layer = gemma3_text.layer


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    return gemma3_text.spec(config.text(values))

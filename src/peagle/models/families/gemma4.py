"""Gemma 4 as it is published: a language model, `gemma4_text`, with towers for images and audio,
which are left out."""

from peagle.models.families import config, gemma4_text
from peagle.models.families.config import Values
from peagle.models.spec import DecoderSpec

MODEL_TYPE = "gemma4"
ARCHITECTURE = "Gemma4ForConditionalGeneration"
PREFIX = "model.language_model"
IGNORED = (
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
)
layer = gemma4_text.layer


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    return gemma4_text.spec(config.text(values))

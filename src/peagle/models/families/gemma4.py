"""Gemma 4 as it is published: a language model, `gemma4_text`, with towers for images and audio,
which are left out."""

from peagle.models.families import gemma4_text

FAMILY = gemma4_text.FAMILY.within(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    prefix="model.language_model",
    ignored=(
        "model.vision_tower.",
        "model.embed_vision.",
        "model.audio_tower.",
        "model.embed_audio.",
    ),
)

"""Gemma 3 as it is published from 4B on: a language model, `gemma3_text`, with a tower for images,
which is left out."""

from peagle.models.families import gemma3_text

FAMILY = gemma3_text.FAMILY.within(
    "gemma3",
    "Gemma3ForConditionalGeneration",
    prefix="language_model.model",
    ignored=("vision_tower.", "multi_modal_projector."),
)

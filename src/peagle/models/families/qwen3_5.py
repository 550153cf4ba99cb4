"""Qwen3.5, 3.6 and 3.8 as they are published: a language model, `qwen3_5_text`, with a tower for
images, which is left out. Their own head for drafts (`mtp.`) is read apart."""

from peagle.models.families import qwen3_5_text

FAMILY = qwen3_5_text.FAMILY.within(
    "qwen3_5", "Qwen3_5ForConditionalGeneration", prefix="model.language_model"
)

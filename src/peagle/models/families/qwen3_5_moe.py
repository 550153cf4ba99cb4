"""Qwen3.5's and 3.6's mixtures of experts as they are published: `qwen3_5_moe_text`, with a tower
for images, which is left out. Their own head for drafts (`mtp.`) is read apart."""

from peagle.models.families import qwen3_5_moe_text

FAMILY = qwen3_5_moe_text.FAMILY.within(
    "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", prefix="model.language_model"
)

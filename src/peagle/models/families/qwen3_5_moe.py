"""Qwen3.5's and 3.6's mixtures of experts as they are published: `qwen3_5_moe_text`, with a tower
for images, which is left out, as are the layers that predict several tokens."""

from peagle.models.families import config, qwen3_5_moe_text
from peagle.models.families.config import Values
from peagle.models.spec import DecoderSpec

MODEL_TYPE = "qwen3_5_moe"
ARCHITECTURE = "Qwen3_5MoeForConditionalGeneration"
PREFIX = "model.language_model"
IGNORED = qwen3_5_moe_text.IGNORED
layer = qwen3_5_moe_text.layer


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    return qwen3_5_moe_text.spec(config.text(values))

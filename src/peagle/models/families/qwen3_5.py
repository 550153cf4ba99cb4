"""Qwen3.5, 3.6 and 3.8 as they are published: a language model, `qwen3_5_text`, with a tower for
images, which is left out, as are the layers that predict several tokens."""

from peagle.models.families import config, qwen3_5_text
from peagle.models.families.config import Values
from peagle.models.spec import DecoderSpec

MODEL_TYPE = "qwen3_5"
ARCHITECTURE = "Qwen3_5ForConditionalGeneration"
PREFIX = "model.language_model"
IGNORED = qwen3_5_text.IGNORED
layer = qwen3_5_text.layer


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    return qwen3_5_text.spec(config.text(values))

"""The language model of Qwen3.5's and 3.6's mixtures of experts: `qwen3_5_text`'s mixers, experts,
and an MLP beside them that every row goes through. Published alike."""

from peagle.models.families import config, qwen3_5_text
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec, MLPSpec, SharedExpertsSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    experts = config.experts(values, norm_topk_prob=bool(values.get("norm_topk_prob", True)))
    [shared] = config.sizes(values, "shared_expert_intermediate_size")
    return qwen3_5_text.of_layers(values, SharedExpertsSpec(MLPSpec(shared), experts))


FAMILY = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", spec, ignored=qwen3_5_text.FAMILY.ignored
)
PUBLISHED = FAMILY.within(
    "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", prefix="model.language_model"
)

"""The language model of Qwen3.5's and 3.6's mixtures of experts: `qwen3_5_text`'s mixers, experts,
and an MLP beside them that every row goes through. Published alike."""

from peagle.models.families import config, qwen3_5_text, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place
from peagle.models.spec import DecoderSpec, ExpertsSpec, LayerSpec, MLPSpec, SharedExpertsSpec
from peagle.models.weights import TensorRule


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    inner = int(values["moe_intermediate_size"])
    experts = ExpertsSpec(
        num_experts=int(values["num_experts"]),
        num_experts_per_tok=int(values["num_experts_per_tok"]),
        moe_intermediate_size=inner,
        intermediate_size=inner,
        norm_topk_prob=True,
    )
    config.check_experts(experts)
    shared = int(values["shared_expert_intermediate_size"])
    config.require_positive(shared_expert_intermediate_size=shared)
    return qwen3_5_text.of_layers(values, SharedExpertsSpec(MLPSpec(shared), experts))


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer."""
    fed = spec.feed_forward
    assert isinstance(fed, SharedExpertsSpec)
    names, inner = ("mlp.experts", "mlp.experts"), (fed.mlp.intermediate_size,) * 2
    both = "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"
    return [
        *qwen3_5_text.mixed(spec, hidden_size, place),
        place.rule("mlp.experts.router", ("mlp.gate.weight",), (fed.experts.num_experts,)),
        *tensors.either(
            tensors.experts_apart(fed.experts, hidden_size, place, *names),
            tensors.experts_together(fed.experts, place, *names),
        ),
        *place.linear("mlp.shared.gate_up", both, inner, bias=False),
        *place.linear("mlp.shared.down", ("mlp.shared_expert.down_proj",), (hidden_size,), False),
        *place.linear("mlp.shared_gate", ("mlp.shared_expert_gate",), (1,), bias=False),
    ]


FAMILY = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", spec, layer, ignored=qwen3_5_text.FAMILY.ignored
)
PUBLISHED = FAMILY.within(
    "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", prefix="model.language_model"
)

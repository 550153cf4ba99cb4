"""Qwen3-MoE: Qwen3's attention, one window for all or none, and experts in every layer, which most
files hold one by one."""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, qwen3, tensors
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.families.tensors import Place
from peagle.models.spec import DecoderSpec, ExpertsSpec, LayerSpec
from peagle.models.weights import TensorRule


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    _refuse_dense_layers(values)
    values = {"max_position_embeddings": qwen3.POSITIONS, **values}
    attention = replace(config.attention(values), qk_norm=True, window=qwen3.window(values))
    layer = LayerSpec(attention, _experts(values), config.norms(values))
    return config.decoder(values, [layer] * config.num_layers(values))


def layer(spec: LayerSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    """The tensors of one layer."""
    experts = spec.feed_forward
    assert isinstance(experts, ExpertsSpec)
    names = "mlp", "mlp.experts"
    return [
        *tensors.norms(hidden_size, place),
        *tensors.attention(spec.attention, hidden_size, place),
        place.rule("mlp.router", ("mlp.gate.weight",), (experts.num_experts,)),
        *tensors.either(
            tensors.experts_apart(experts, hidden_size, place, *names),
            tensors.experts_together(experts, place, *names),
        ),
    ]


def _experts(values: Values) -> ExpertsSpec:
    # transformers 5 writes their number under Mixtral's name
    count = "num_local_experts" if "num_local_experts" in values else "num_experts"
    spec = ExpertsSpec(
        num_experts=int(values[count]),
        num_experts_per_tok=int(values["num_experts_per_tok"]),
        moe_intermediate_size=int(values["moe_intermediate_size"]),
        intermediate_size=config.mlp(values).intermediate_size,
        norm_topk_prob=bool(values.get("norm_topk_prob", False)),
    )
    config.check_experts(spec)
    return spec


def _refuse_dense_layers(values: Values) -> None:
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise InputError(
            f"dense layers between expert layers (decoder_sparse_step {step}, mlp_only_layers "
            f"{dense}) are not supported; vLLM serves them"
        )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", spec, layer)

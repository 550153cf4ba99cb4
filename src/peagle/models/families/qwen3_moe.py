"""Qwen3-MoE: Qwen3's attention, one window for all or none, and experts in every layer, which most
files hold one by one."""

from dataclasses import replace

from peagle.errors import InputError
from peagle.models.families import config, qwen3
from peagle.models.families.config import Values
from peagle.models.families.family import Family
from peagle.models.spec import DecoderSpec, ExpertsSpec, LayerSpec


def spec(values: Values) -> DecoderSpec:
    """What the values of a `config.json` mean."""
    refuse_dense_layers(values)
    values = {"max_position_embeddings": qwen3.POSITIONS, **values}
    attention = replace(config.attention(values), qk_norm=True, window=qwen3.window(values))
    layer = LayerSpec(attention, _experts(values), config.norms(values))
    return config.decoder(values, [layer] * config.num_layers(values))


def _experts(values: Values) -> ExpertsSpec:
    return config.experts(
        values,
        # transformers 5 writes their number under Mixtral's name
        count="num_local_experts" if "num_local_experts" in values else "num_experts",
        intermediate_size=config.mlp(values).intermediate_size,
        norm_topk_prob=bool(values.get("norm_topk_prob", False)),
    )


def refuse_dense_layers(values: Values) -> None:
    """Raise `InputError` where some layers have no experts."""
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise InputError(
            f"dense layers between expert layers (decoder_sparse_step {step}, mlp_only_layers "
            f"{dense}) are not supported; vLLM serves them"
        )


FAMILY = Family("qwen3_moe", "Qwen3MoeForCausalLM", spec)

"""Hugging Face's `config.json` of a shape's target, as published ones have it."""

from typing import Any

from peagle.bench.random_weights import BLOCK
from peagle.models.families import (
    config,
    gemma4_text,
    gpt_oss,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
)
from peagle.models.families.family import Family
from peagle.models.families.qwen3_5_text import LINEAR
from peagle.models.spec import (
    DecoderSpec,
    ExpertsSpec,
    MixtureSpec,
    SandwichSpec,
    SharedExpertsSpec,
)

Values = dict[str, Any]
PLAIN_IN_MXFP4 = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens"]


def config_json(spec: DecoderSpec, dtype: str, quantization: str | None = None) -> Values:
    """The configuration. quantization: the target's, as of `Weights`."""
    attention, inner = next(iter(spec.attention.values())), spec.layers[0].feed_forward
    inner = inner.mlp if isinstance(inner, MixtureSpec) else inner
    values = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": inner.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": spec.norm.eps,
        "max_position_embeddings": spec.max_length,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "attention_bias": attention.bias,
        "hidden_act": "silu",
        "rope_theta": attention.rope.theta,
        "torch_dtype": dtype,
        **_of_family(spec),
    }
    if quantization is not None:
        values["quantization_config"] = _quantization(spec, quantization)
    return values


def _of_family(spec: DecoderSpec) -> Values:
    """What not every family says."""
    inner = spec.layers[0].feed_forward
    if spec.recurrent:
        return _hybrid(spec)
    if isinstance(spec.layers[0].norms, SandwichSpec):
        return _named(gemma4_text.FAMILY) | _gemma(spec) | _windows(spec)
    if not isinstance(inner, ExpertsSpec):
        return _named(qwen3.FAMILY)
    values: Values = {"num_experts_per_tok": inner.num_experts_per_tok}
    if inner.swiglu_limit is not None:
        values |= {"num_local_experts": inner.num_experts, "swiglu_limit": inner.swiglu_limit}
        return _named(gpt_oss.FAMILY) | values | _windows(spec) | {"rope_scaling": _yarn(spec)}
    names = ("num_experts", "moe_intermediate_size", "norm_topk_prob")
    values |= {name: getattr(inner, name) for name in names}
    return _named(qwen3_moe.FAMILY) | values | {"decoder_sparse_step": 1, "mlp_only_layers": []}


def _hybrid(spec: DecoderSpec) -> Values:
    """Qwen3.5's, whose layers are gated delta nets but for some that attend."""
    heads, rope = next(iter(spec.recurrent.values())), next(iter(spec.attention.values())).rope
    fed, family = spec.layers[0].feed_forward, qwen3_5_text.FAMILY
    values: Values = {
        "layer_types": [
            LINEAR if i in spec.recurrent else config.FULL for i in range(len(spec.layers))
        ],
        "linear_num_key_heads": heads.num_key_heads,
        "linear_num_value_heads": heads.num_value_heads,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "linear_conv_kernel_dim": heads.conv_width,
        "partial_rotary_factor": rope.partial_rotary_factor,
        "mtp_num_hidden_layers": 1,
    }
    if isinstance(fed, SharedExpertsSpec):
        family = qwen3_5_moe_text.FAMILY
        values |= {
            "num_experts": fed.experts.num_experts,
            "num_experts_per_tok": fed.experts.num_experts_per_tok,
            "moe_intermediate_size": fed.experts.moe_intermediate_size,
            "shared_expert_intermediate_size": fed.mlp.intermediate_size,
        }
    return _named(family) | values


def _gemma(spec: DecoderSpec) -> Values:
    """Gemma 4's, whose last layer sees whole contexts, through other heads than the first."""
    sliding, *_, full = spec.attention.values()
    ropes = {config.SLIDING: sliding.rope, config.FULL: full.rope}
    return _experts_beside(spec) | {
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": full.k_eq_v,
        "final_logit_softcapping": spec.logit_softcap,
        "hidden_size_per_layer_input": 0,
        "rope_parameters": {
            kind: {
                "rope_type": rope.kind,
                "rope_theta": rope.theta,
                "partial_rotary_factor": rope.partial_rotary_factor,
            }
            for kind, rope in ropes.items()
        },
    }


def _experts_beside(spec: DecoderSpec) -> Values:
    """Of Gemma 4's layers that have experts."""
    experts = spec.layers[0].experts
    if experts is None:
        return {"enable_moe_block": False}
    return {
        "enable_moe_block": True,
        "num_experts": experts.num_experts,
        "top_k_experts": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.moe_intermediate_size,
    }


def _named(family: Family) -> Values:
    return {"architectures": [family.architecture], "model_type": family.model_type}


def _windows(spec: DecoderSpec) -> Values:
    widths = [each.window for each in spec.attention.values()]
    [width] = {width for width in widths if width is not None}
    types = [config.FULL if width is None else config.SLIDING for width in widths]
    return {"sliding_window": width, "layer_types": types}


def _yarn(spec: DecoderSpec) -> Values:
    rope = next(iter(spec.attention.values())).rope
    names = ("factor", "beta_fast", "beta_slow", "truncate")
    values = {name: getattr(rope, name) for name in names}
    original = {"original_max_position_embeddings": rope.original_max_position}
    return {"rope_type": rope.kind, **values, **original}


FOUR_BITS = {
    "int4": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    ),
}
"""compressed-tensors' formats, and what it says of weights in them."""


def _quantization(spec: DecoderSpec, quantization: str) -> Values:
    """OpenAI's of GPT-OSS, Qwen's of its FP8 targets, or compressed-tensors'."""
    if quantization == "mxfp4":
        kept = [*PLAIN_IN_MXFP4, "lm_head"]
        return {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    routers = [
        f"model.layers.{index}.mlp.gate"
        for index, layer in enumerate(spec.layers)
        if layer.experts is not None
    ]
    if quantization in FOUR_BITS:
        form, weights = FOUR_BITS[quantization]
        group = {"targets": ["Linear"], "weights": weights, "format": form}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", *routers],
        }
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [*BLOCK],
        "modules_to_not_convert": ["lm_head", *routers, *(["mtp.fc"] if spec.recurrent else [])],
    }

"""Hugging Face configurations of each target family -> our decoder's."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from peagle.errors import InputError
from peagle.models.decoder import DecoderConfig
from peagle.models.weights import read_json
from peagle.ops.moe import ALPHA
from peagle.ops.rope import RopeConfig

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
}
EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


def read_target_config(directory: Path) -> DecoderConfig:
    """A target's `config.json`. Raises `InputError` as `decoder_config` does."""
    return decoder_config(read_json(directory / "config.json"), str(directory))


def decoder_config(values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The decoder that the values of a target's `config.json` describe.

    Raises `InputError` for an architecture or a setting that the decoder does not have, a missing
    key and a value of the wrong kind.
    """
    architecture = architecture_of(values)
    if architecture not in FAMILIES:
        raise InputError(
            f"{source}: architecture {architecture} is not supported; peagle runs "
            f"{', '.join(sorted(FAMILIES))}; vLLM serves other targets with the same drafter"
        )
    family = FAMILIES[architecture]
    with reading(source):
        config = transformer_config(values, family, source)
        return MORE_OF[family](config, values, source) if family in MORE_OF else config


def architecture_of(values: Mapping[str, Any]) -> str:
    """The first of a configuration's `architectures`, "none" where there is none."""
    match values.get("architectures"):
        case [str(first), *_]:
            return first
    return "none"


@contextmanager
def reading(source: str) -> Iterator[None]:
    """Turn what goes wrong while a configuration's values are read into `InputError`."""
    try:
        yield
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{source}: config.json lacks {error.args[0]}") from None
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise InputError(f"{source}: config.json has a value of the wrong kind: {error}") from None


def transformer_config(values: Mapping[str, Any], model_type: str, source: str) -> DecoderConfig:
    """The sizes of a dense Llama- or Qwen3-style transformer, target or drafter.

    Call it within `reading`.
    """
    _refuse_unsupported(values, model_type, source)
    heads = int(values["num_attention_heads"])
    config = DecoderConfig(
        vocab_size=int(values["vocab_size"]),
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        num_hidden_layers=int(values["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // heads),
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6)),
        rope=rope_config(values, source),
        max_position_embeddings=int(values.get("max_position_embeddings", 2048)),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        attention_bias=bool(values.get("attention_bias", False)),
        mlp_bias=bool(values.get("mlp_bias", False)),
    )
    _refuse_impossible(config, source)
    return config


def _qwen3_moe(config: DecoderConfig, values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The same transformer with experts in every layer."""
    _refuse_dense_layers(values, source)
    # transformers 5 writes Qwen3-MoE's count under Mixtral's name
    count = "num_local_experts" if "num_local_experts" in values else "num_experts"
    config = replace(
        config,
        num_experts=int(values[count]),
        num_experts_per_tok=int(values["num_experts_per_tok"]),
        moe_intermediate_size=int(values["moe_intermediate_size"]),
        norm_topk_prob=bool(values.get("norm_topk_prob", False)),
    )
    _refuse_impossible_experts(config, source)
    return config


def _gpt_oss(config: DecoderConfig, values: Mapping[str, Any], source: str) -> DecoderConfig:
    """The same transformer with sinks, windows in some layers, and GPT-OSS's experts in all."""
    config = replace(
        config,
        attention_bias=bool(values.get("attention_bias", True)),
        attention_sinks=True,
        sliding_window=int(values["sliding_window"]),
        layer_types=tuple(values["layer_types"]),
        num_experts=int(values["num_local_experts"]),
        num_experts_per_tok=int(values["num_experts_per_tok"]),
        moe_intermediate_size=config.intermediate_size,
        norm_topk_prob=True,
        swiglu_limit=float(values.get("swiglu_limit", 7.0)),
    )
    _refuse_impossible_experts(config, source)
    _refuse_below_one(config, ["sliding_window"], source)
    _refuse_other_layers(config, source)
    if values.get("swiglu_alpha", ALPHA) != ALPHA:
        raise InputError(f"{source}: swiglu_alpha {values['swiglu_alpha']} is not {ALPHA}")
    return config


MORE_OF = {"qwen3_moe": _qwen3_moe, "gpt_oss": _gpt_oss}
"""What these families add to a dense transformer."""


def _refuse_impossible(config: DecoderConfig, source: str) -> None:
    sizes = [name for name in vars(config) if name not in EXPERT_SIZES]
    _refuse_below_one(config, sizes, source)
    if config.num_attention_heads % config.num_key_value_heads:
        raise InputError(
            f"{source}: {config.num_attention_heads} attention heads cannot share "
            f"{config.num_key_value_heads} key-value heads evenly"
        )
    if config.head_dim % 2:
        raise InputError(f"{source}: head_dim {config.head_dim} is odd; RoPE needs pairs")


def _refuse_impossible_experts(config: DecoderConfig, source: str) -> None:
    _refuse_below_one(config, EXPERT_SIZES, source)
    if config.num_experts_per_tok > config.num_experts:
        raise InputError(
            f"{source}: num_experts_per_tok is {config.num_experts_per_tok}; it must be at most "
            f"num_experts, {config.num_experts}"
        )


def _refuse_below_one(config: DecoderConfig, names: Iterable[str], source: str) -> None:
    for name in names:
        value = getattr(config, name)
        if type(value) is int and value < 1:
            raise InputError(f"{source}: {name} is {value}; it must be at least 1")


def _refuse_dense_layers(values: Mapping[str, Any], source: str) -> None:
    step, dense = values.get("decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if step != 1 or dense:
        raise InputError(
            f"{source}: dense layers between expert layers (decoder_sparse_step {step}, "
            f"mlp_only_layers {dense}) are not supported; vLLM serves them"
        )


def _refuse_other_layers(config: DecoderConfig, source: str) -> None:
    types, layers = config.layer_types, config.num_hidden_layers
    other = set(types) - {"sliding_attention", "full_attention"}
    if other:
        raise InputError(f"{source}: layers of type {', '.join(sorted(other))} are not supported")
    if len(types) != layers:
        raise InputError(f"{source}: layer_types names {len(types)} of {layers} layers")


def _refuse_unsupported(values: Mapping[str, Any], family: str, source: str) -> None:
    if values.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InputError(f"{source}: hidden_act {values['hidden_act']} is not supported, only silu")
    layer_types = values.get("layer_types") or []
    windowed = values.get("use_sliding_window") or "sliding_attention" in layer_types
    if family != "gpt_oss" and windowed and values.get("sliding_window"):
        raise InputError(f"{source}: sliding-window attention is not supported; vLLM serves it")
    quantization = values.get("quantization_config") or {}
    readable = family == "gpt_oss" and quantization.get("quant_method") == "mxfp4"
    if quantization and not readable:
        raise InputError(f"{source}: quantized weights are not supported; give the bf16 checkpoint")


def rope_config(values: Mapping[str, Any], source: str) -> RopeConfig:
    """Rotary settings, from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    scaling: dict[str, Any] = dict(
        values.get("rope_parameters") or values.get("rope_scaling") or {}
    )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if (
        kind not in ROPE_KINDS
        or "mscale" in scaling
        or scaling.get("partial_rotary_factor", 1) != 1
    ):
        known = ", ".join(ROPE_KINDS)
        raise InputError(f"{source}: rope scaling {kind} is not supported; peagle supports {known}")
    given = scaling.get("original_max_position_embeddings")
    scale = scaling.get("attention_factor")
    rope = RopeConfig(
        theta=float(scaling.get("rope_theta") or values.get("rope_theta", 10000.0)),
        kind=kind,
        factor=float(scaling.get("factor", 1.0)),
        original_max_position=int(given or values.get("max_position_embeddings", 2048)),
        low_freq_factor=float(scaling.get("low_freq_factor", 1.0)),
        high_freq_factor=float(scaling.get("high_freq_factor", 4.0)),
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=None if scale is None else float(scale),
        truncate=bool(scaling.get("truncate", True)),
    )
    for name, value in vars(rope).items():
        least = 1 if name == "theta" else 0  # yarn divides by its logarithm
        if type(value) in (int, float) and not least < value < math.inf:
            raise InputError(f"{source}: rope {name} is {value}; it must be a number above {least}")
    return rope

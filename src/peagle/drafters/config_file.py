"""A drafter's `config.json`, in vLLM's layout or speculators': what it means, and writing it."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle.drafters.correction import read_selector_config
from peagle.drafters.model import DrafterConfig, default_taps
from peagle.errors import InputError
from peagle.models.families import Family, llama, qwen3
from peagle.models.families.config import architecture_of, reading, require_positive
from peagle.models.spec import DecoderSpec
from peagle.models.weights import read_json
from peagle.ops.rope import RopeConfig

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
KNOWN_ARCHITECTURES = {
    *ARCHITECTURES.values(),
    "Eagle3LlamaForCausalLM",
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "PEagleSpeculator",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
    "PeagleQwen3ForCausalLM",
}
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")


def read_drafter_config(directory: Path, target: DecoderSpec) -> DrafterConfig:
    """A drafter's `config.json`, in vLLM's raw layout or in speculators', and its selector's.

    Raises `InputError` for another architecture, a missing key or a value of the wrong kind.
    """
    values, source = read_json(directory / "config.json"), str(directory)
    with reading(source):
        nested: dict[str, Any] = dict(values.get("transformer_layer_config") or {})  # type: ignore[call-overload]
        flat = {**values, **nested, **_speculators_keys(values)}
        config = _drafter_config(flat, target)
    return replace(config, selector=read_selector_config(directory))


def _speculators_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that speculators' format keeps elsewhere or defaults differently."""
    algorithm = values.get("speculators_model_type")
    if algorithm is None:
        return {}
    if algorithm not in ("eagle3", "peagle"):
        raise InputError(
            f"speculators_model_type {algorithm} is not supported, only eagle3 and peagle"
        )
    keys: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": values.get("norm_before_residual", algorithm == "eagle3"),
    }
    proposals = (values.get("speculators_config") or {}).get("proposal_methods") or []
    if proposals and proposals[0].get("speculative_tokens"):
        keys["num_speculative_tokens"] = proposals[0]["speculative_tokens"]
    return keys


def _drafter_config(values: Mapping[str, Any], target: DecoderSpec) -> DrafterConfig:
    """The meaning of a flat configuration."""
    architecture = architecture_of(values)
    if architecture not in KNOWN_ARCHITECTURES:
        raise InputError(f"architecture {architecture} is not an EAGLE-3 or P-EAGLE drafter")
    style: Family = qwen3 if values.get("model_type") == qwen3.MODEL_TYPE else llama
    eagle: Mapping[str, Any] = values.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise InputError("an EAGLE-1 drafter (use_aux_hidden_state false)")
    listed = values.get(TAPS_KEY) or eagle.get(TAPS_KEY) or default_taps(len(target.layers))
    trained = values.get("num_speculative_tokens")
    transformer = style.spec(values)
    if not all(layer.attention.full for layer in transformer.layers):
        raise InputError("sliding-window attention is not supported in a drafter")
    read = int(values.get("target_hidden_size") or target.hidden_size)
    drafted = int(values.get("draft_vocab_size") or values["vocab_size"])
    require_positive(
        target_hidden_size=read, draft_vocab_size=drafted, num_speculative_tokens=int(trained or 1)
    )
    return DrafterConfig(
        transformer=transformer,
        target_hidden_size=read,
        taps=tuple(sorted(map(int, listed))),
        draft_vocab_size=drafted,
        mask_token_id=_mask_token_id(values),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", values.get("norm_before_fc", False))),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
        trained_tokens=int(trained) if trained else None,
    )


def _mask_token_id(values: Mapping[str, Any]) -> int | None:
    """The mask token, under whichever key it is; None for EAGLE-3."""
    nested = (values.get("dflash_config") or {}).get("mask_token_id")
    given = [value for value in (nested, *map(values.get, MASK_KEYS)) if value is not None]
    return int(given[0]) if given else None


def config_problems(
    config: DrafterConfig,
    target: DecoderSpec,
    taps_key: str = TAPS_KEY,
    mask_key: str = "pard_token and ptd_token_id",
) -> list[str]:
    """Everything in a drafter's configuration that does not fit its target, each with a fix.

    taps_key, mask_key: where the configuration has its taps and its mask token.
    """
    shape = config.transformer
    problems = []
    if config.target_hidden_size != target.hidden_size:
        problems.append(
            f"it reads features of width {config.target_hidden_size}, the target's hidden size is "
            f"{target.hidden_size}; use the target it was trained for"
        )
    if shape.vocab_size != target.vocab_size:
        problems.append(
            f"its vocabulary has {shape.vocab_size} tokens, the target's {target.vocab_size}; "
            "use the target it was trained for"
        )
    if any(not 0 <= tap <= len(target.layers) for tap in config.taps) or not config.taps:
        problems.append(
            f"its aux layers {list(config.taps)} are not all within the target's 0 to "
            f"{len(target.layers)}; correct {taps_key}"
        )
    if len(set(config.taps)) != len(config.taps):
        problems.append(f"its aux layers {list(config.taps)} repeat; list each layer once")
    mask = config.mask_token_id
    if mask is not None and not 0 <= mask < shape.vocab_size:
        problems.append(
            f"its mask token id {mask} is outside the vocabulary of {shape.vocab_size}; "
            f"set {mask_key} to the drafter's reserved id"
        )
    return problems


def config_json(config: DrafterConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json` in vLLM's raw layout."""
    shape, attention, mlp = config.transformer, config.layer.attention, config.mlp
    model_type = "qwen3" if attention.qk_norm else "llama"
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES[model_type]],
        "model_type": model_type,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "hidden_size": shape.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": mlp.intermediate_size,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "rms_norm_eps": shape.norm.eps,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_length,
        "rope_theta": attention.rope.theta,
        "attention_bias": attention.bias,
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        TAPS_KEY: list(config.taps),
        "num_aux_hidden_states": len(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_speculative_tokens": config.trained_tokens,
    }
    if config.parallel:
        values.update(pard_token=config.mask_token_id, ptd_token_id=config.mask_token_id)
    if attention.rope.kind != "default":
        values["rope_scaling"] = _rope_json(attention.rope)
    return values


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    values: dict[str, Any] = {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
    }
    if rope.kind == "llama3":
        values |= {
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.kind == "yarn":
        values |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        values |= {"attention_factor": rope.attention_factor, "truncate": rope.truncate}
    return values

"""A drafter's `config.json`, in vLLM's layout or speculators': what it means, and writing it."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from peagle.drafters.correction import read_selector_config
from peagle.drafters.kind import EAGLE3, PEAGLE, Kind
from peagle.drafters.model import DrafterConfig, default_taps
from peagle.drafters.network import NetworkConfig
from peagle.errors import InputError
from peagle.models.families import llama, qwen3
from peagle.models.families.config import (
    FULL,
    SLIDING,
    architecture_of,
    mlp,
    num_layers,
    reading,
    require_positive,
    windows,
)
from peagle.models.spec import DecoderSpec
from peagle.models.weights import read_json
from peagle.ops.rope import RopeConfig

ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
LLAMA_STYLE = {
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "LlamaEagle3DraftModel",
    "LlamaForCausalLM",
    "PeagleLlamaForCausalLM",
}
QWEN3_STYLE = {"Eagle3Qwen3ForCausalLM", "Qwen3ForCausalLM", "PeagleQwen3ForCausalLM"}
EITHER_STYLE = {"Eagle3Speculator", "Eagle3DraftModel", "PEagleSpeculator", "PEagleDraftModel"}
"""Architectures whose layers are those of the configuration's `model_type`."""
NO_MASK_TOKEN = (
    "it is a P-EAGLE drafter without a mask token id; set pard_token and ptd_token_id to the one "
    "of its training"
)
SPECULATORS = "speculators_model_type"
"""The key by which speculators' format is known."""
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
TAPS_BEFORE_KEY = "aux_hidden_states_layer_ids"
"""AngelSlim's key, which names the layer whose output is a feature: one below the tap."""
MASK_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")
ACTIVATIONS: dict[str, Any] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""An MLP's activation by `hidden_act`."""
ROPE_KEYS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    "longrope": ("attention_factor", "short_factor", "long_factor"),
}
"""Further keys of a rotation by its kind."""


def read_drafter_config(directory: Path, target: DecoderSpec) -> DrafterConfig:
    """A drafter's `config.json`, in vLLM's raw layout or in speculators', and its selector's.

    Raises `InputError` for another architecture, a missing key or a value of the wrong kind.
    """
    with reading(str(directory)):
        config = _drafter_config(_flat(read_json(directory / "config.json")), target)
    return replace(config, selector=read_selector_config(directory))


def kind_of(directory: Path) -> Kind:
    """The kind of drafter that a directory holds, by any sign of its `config.json`."""
    with reading(str(directory)):
        values = _flat(read_json(directory / "config.json"))
        return EAGLE3 if _mask_token_id(values) is None else PEAGLE


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration's values without speculators' nesting."""
    nested = values.get("transformer_layer_config") or {}
    return {**values, **nested, **_speculators_keys(values), **_nemo_keys(values)}


def _nemo_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """The size of NeMo's EAGLE-3 heads: one layer, beside their target's depth and layer types."""
    if values.get("parallel_drafting") is not False:  # which NeMo alone writes
        return {}
    return {"num_hidden_layers": 1, "layer_types": (values.get("layer_types") or [])[:1]}


def _speculators_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Keys that speculators' format keeps elsewhere or defaults differently."""
    algorithm = values.get(SPECULATORS)
    if algorithm is None:
        return {}
    if algorithm not in ("eagle3", "peagle"):
        raise InputError(
            f"speculators_model_type {algorithm} is not supported, only eagle3 and peagle"
        )
    [proposal, *_] = (values.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return {
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": values.get("norm_before_residual", algorithm == "eagle3"),
        "num_speculative_tokens": proposal.get("speculative_tokens"),
    }


def _drafter_config(values: Mapping[str, Any], target: DecoderSpec) -> DrafterConfig:
    """The meaning of a flat configuration."""
    eagle: Mapping[str, Any] = values.get("eagle_config") or {}
    if not eagle.get("use_aux_hidden_state", True):
        raise InputError("an EAGLE-1 drafter (use_aux_hidden_state false)")
    taps, trained = _taps(values, eagle), values.get("num_speculative_tokens")
    transformer = _transformer(values)
    read = int(values.get("target_hidden_size") or target.hidden_size)
    drafted = int(values.get("draft_vocab_size") or values["vocab_size"])
    require_positive(
        target_hidden_size=read, draft_vocab_size=drafted, num_speculative_tokens=int(trained or 1)
    )
    return DrafterConfig(
        transformer=transformer,
        target_hidden_size=read,
        taps=taps or default_taps(len(target.layers)),
        taps_named=bool(taps),
        draft_vocab_size=drafted,
        mask_token_id=_mask_token_id(values),
        norm_before_residual=bool(values.get("norm_before_residual", False)),
        norm_before_fc=bool(eagle.get("norm_before_fc", values.get("norm_before_fc", False))),
        fc_norm=bool(values.get("fc_norm", False)),
        norm_output=bool(values.get("norm_output", False)),
        trained_tokens=int(trained) if trained else None,
    )


def _transformer(values: Mapping[str, Any]) -> DecoderSpec:
    """The draft layers. Their style is the architecture's, as in vLLM, or the `model_type`'s."""
    architecture = architecture_of(values)
    by_type = architecture in EITHER_STYLE and values.get("model_type") == qwen3.FAMILY.model_type
    as_qwen3 = by_type or architecture in QWEN3_STYLE
    style = qwen3.FAMILY if as_qwen3 else llama.FAMILY
    if architecture not in LLAMA_STYLE | QWEN3_STYLE | EITHER_STYLE:
        raise InputError(f"architecture {architecture} is not an EAGLE-3 or P-EAGLE drafter")
    activation = values.get("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise InputError(f"hidden_act {activation} is not supported, only {', '.join(ACTIVATIONS)}")
    full = {"layer_types": None, "use_sliding_window": False, "hidden_act": "silu"}
    spec = style.spec({**values, **full})
    fed = replace(mlp(values), activation=ACTIVATIONS[activation])
    layers = [
        replace(layer, mixer=replace(layer.attention, window=window), feed_forward=fed)
        for layer, window in zip(spec.layers, draft_windows(values, as_qwen3), strict=True)
    ]
    return replace(spec, layers=tuple(layers))


def draft_windows(values: Mapping[str, Any], as_qwen3: bool) -> list[int | None]:
    """The draft layers' windows, as vLLM reads them.

    `layer_types` and `sliding_window` decide; vLLM reads Qwen3's own layout through transformers,
    where `use_sliding_window` turns them on.
    """
    types, width = values.get("layer_types") or (), values.get("sliding_window")
    if as_qwen3 and SPECULATORS not in values:
        widths = qwen3.windows(values)
    elif types and width:
        require_positive(sliding_window=int(width))
        widths = windows(values, types, int(width))
    else:
        widths = [None] * num_layers(values)
    if SLIDING in types and not any(widths):
        off = "its layer_types name windows, which its other keys turn off"
        warnings.warn(f"{off}: its layers see all positions, as in vLLM", stacklevel=2)
    return widths


def _taps(values: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...]:
    """The tapped layers that a configuration names, ascending; none where it names none."""
    listed = [int(tap) for tap in values.get(TAPS_KEY) or eagle.get(TAPS_KEY) or ()]
    if not listed:
        before = values.get(TAPS_BEFORE_KEY) or eagle.get(TAPS_BEFORE_KEY) or ()
        listed = [int(layer) + 1 for layer in before]
    counted = values.get("num_aux_hidden_states")
    if counted not in (None, len(listed) or len(default_taps(1_000))):
        said = f"names {len(listed)}" if listed else "names none"
        raise InputError(f"it counts {counted} aux layers and {said}; correct {TAPS_KEY}")
    return tuple(sorted(listed))


def _mask_token_id(values: Mapping[str, Any]) -> int | None:
    """The mask token, under whichever key it is; None for EAGLE-3."""
    nested = (values.get("dflash_config") or {}).get("mask_token_id")
    given = [value for value in (nested, *map(values.get, MASK_KEYS)) if value is not None]
    if not given and values.get("parallel_drafting"):
        raise InputError(NO_MASK_TOKEN)
    return int(given[0]) if given else None


def config_problems(
    config: NetworkConfig,
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
    values: dict[str, Any] = {
        "architectures": [ARCHITECTURES["qwen3" if config.attention.qk_norm else "llama"]],
        **layers_json(config, dtype),
        TAPS_KEY: list(config.taps),
        "num_aux_hidden_states": len(config.taps),
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_speculative_tokens": config.trained_tokens,
    }
    if config.kind is PEAGLE:
        values.update(pard_token=config.mask_token_id, ptd_token_id=config.mask_token_id)
    return values


def layers_json(config: NetworkConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The keys of a head's sizes, in any layout."""
    shape, attention, mlp = config.transformer, config.attention, config.mlp
    values: dict[str, Any] = {
        "model_type": "qwen3" if attention.qk_norm else "llama",
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
        "hidden_act": "silu" if mlp.activation == "silu" else "gelu_pytorch_tanh",
        "max_position_embeddings": shape.max_length,
        "rope_theta": attention.rope.theta,
        "attention_bias": attention.bias,
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    widths = [each.window for each in shape.attention.values()]
    if any(widths):
        values["layer_types"] = [FULL if width is None else SLIDING for width in widths]
        values["sliding_window"] = max(width for width in widths if width is not None)
        values["use_sliding_window"] = True
    if attention.rope.kind != "default":
        values["rope_scaling"] = _rope_json(attention.rope)
    return values


def _rope_json(rope: RopeConfig) -> dict[str, Any]:
    return {
        "rope_type": rope.kind,
        "factor": rope.factor,
        "original_max_position_embeddings": rope.original_max_position,
        **{key: getattr(rope, key) for key in ROPE_KEYS.get(rope.kind, ())},
    }

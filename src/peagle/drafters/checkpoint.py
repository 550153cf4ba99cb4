"""A drafter's directory in vLLM's layout: strict reading, and writing."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.config import DrafterFormat
from peagle.drafters.correction import (
    read_selector_config,
    save_selector,
    selector_problems,
    selector_rules,
    selector_tensors,
)
from peagle.drafters.model import DrafterConfig, DraftModel, default_taps
from peagle.drafters.quantization import quantize
from peagle.drafters.vocabulary import doubts, membership
from peagle.errors import InputError
from peagle.files import replacing_directory
from peagle.models.decoder import Decoder
from peagle.models.families import Family, llama, qwen3
from peagle.models.families.config import architecture_of, reading
from peagle.models.families.tensors import Place, dense_layer
from peagle.models.spec import DecoderSpec
from peagle.models.weights import (
    TensorRule,
    about,
    assemble,
    disassemble,
    read_json,
    read_tensors,
    save_tensors,
    tensor_names,
)
from peagle.ops.packing import pack
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
MASK_HIDDEN, D2T, T2D = "mask_hidden", "d2t", "t2d"
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


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
    return DrafterConfig(
        transformer=transformer,
        target_hidden_size=int(values.get("target_hidden_size") or target.hidden_size),
        taps=tuple(sorted(map(int, listed))),
        draft_vocab_size=int(values.get("draft_vocab_size") or values["vocab_size"]),
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


def drafter_rules(config: DrafterConfig, shared: frozenset[str] = frozenset()) -> list[TensorRule]:
    """Every tensor of a drafter's file except d2t, t2d and the `shared` ones."""
    shape = config.transformer
    rules = [
        TensorRule("embed.weight", (EMBEDDINGS,), (shape.vocab_size,)),
        TensorRule("readout.head.weight", (HEAD,), (config.draft_vocab_size,)),
        TensorRule("fc.weight", ("fc.weight",), (shape.hidden_size,)),
        TensorRule("readout.norm.weight", ("norm.weight",), (shape.hidden_size,)),
        TensorRule(
            "first.hidden_norm.weight", ("layers.0.hidden_norm.weight",), (shape.hidden_size,)
        ),
    ]
    for index, layer in enumerate(shape.layers):
        place = Place(f"rest.{index - 1}" if index else "first", f"layers.{index}")
        rules += dense_layer(layer, shape.hidden_size, place)
    if config.norm_before_fc:
        rules.append(
            TensorRule("feature_norm.weight", ("input_norm.weight",), (config.feature_size,))
        )
    if config.fc_norm:
        rules += [
            TensorRule(
                f"tap_norms.{i}.weight", (f"fc_norm.{i}.weight",), (config.target_hidden_size,)
            )
            for i in range(len(config.taps))
        ]
    if config.parallel:
        rules.append(TensorRule("mask_hidden", (MASK_HIDDEN,), (config.feature_size,)))
    return [rule for rule in rules if rule.theirs[0] not in shared]


def load_drafter(
    directory: Path,
    target: Decoder,
    parallel: bool | None = None,
    quantization: DrafterFormat | None = None,
) -> DraftModel:
    """A drafter ready for inference, rounded if asked. Otherwise as `read_drafter`."""
    model = read_drafter(directory, target, parallel).requires_grad_(False).eval()
    if quantization is not None:
        quantize(model)
    pack(model)
    return model


def read_drafter(directory: Path, target: Decoder, parallel: bool | None = None) -> DraftModel:
    """A drafter, which shares with its target what its own file leaves out.

    parallel: how it will run; None: as whatever the files hold. Raises `InputError` naming every
    problem: wrong configuration, missing, unexpected or misshapen tensors, wrong method.
    """
    config = read_drafter_config(directory, target.spec)
    tensors = normalised(read_tensors(directory))
    problems = config_problems(config, target.spec) + method_problems(config, tensors, parallel)
    if problems:
        raise InputError(f"{directory} does not fit its target: " + "; ".join(problems))
    config = effective_config(config, tensors)
    corrections = selector_tensors(directory) if config.selector else {}
    if config.selector and (problems := selector_problems(config, corrections)):
        raise InputError(f"{directory}: {problems[0]}")
    with torch.device("meta"):
        model = DraftModel(config, target.max_length)
    shared = shared_tensors(config, target.spec, tensors)
    _attach_shared(model, target, shared)
    dtype, device = target.embed.weight.dtype, target.embed.weight.device
    rules, ignored = drafter_rules(config, shared), [D2T, T2D]
    with about(directory):
        assemble(model, rules, tensors, ignored, dtype, device)
        attach_vocabulary(model, tensors)
        if model.readout.selector is not None:
            rules = selector_rules(config)
            assemble(model.readout.selector, rules, corrections, (), dtype, device)
    for doubt in vocabulary_doubts(config, tensors):
        warnings.warn(f"{directory}: {doubt}", stacklevel=2)
    return model.to(device=device, dtype=dtype)


def normalised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensor names as vLLM sees them: `midlayer` is layer 0, `mask_hidden` is flat."""
    renamed = {name.replace("midlayer.", "layers.0."): value for name, value in tensors.items()}
    if MASK_HIDDEN in renamed:
        renamed[MASK_HIDDEN] = renamed[MASK_HIDDEN].reshape(-1)
    return renamed


def method_problems(
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    parallel: bool | None,
    as_eagle3: str = "set parallel_drafting to false",
    as_peagle: str = "set parallel_drafting to true",
) -> list[str]:
    """What is wrong if the files are not the kind of drafter they are to run as.

    as_eagle3, as_peagle: how the user says what it is to run as.
    """
    if parallel and MASK_HIDDEN not in tensors:
        return [f"it has no mask_hidden, so it is an EAGLE-3 drafter; {as_eagle3}"]
    if parallel is False and MASK_HIDDEN in tensors:
        return [f"it has mask_hidden, so it is a P-EAGLE drafter; {as_peagle}"]
    if MASK_HIDDEN in tensors and not config.parallel:
        return ["it has mask_hidden but no mask token id; set pard_token and ptd_token_id"]
    return []


def is_parallel(directory: Path) -> bool:
    """Whether a directory's tensors are a P-EAGLE drafter's. Raises `InputError`."""
    return MASK_HIDDEN in tensor_names(directory)


def effective_config(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> DrafterConfig:
    """A configuration that names a mask token without a `mask_hidden` tensor is EAGLE-3's."""
    if MASK_HIDDEN in tensors:
        return config
    return replace(config, mask_token_id=None)


def shared_tensors(
    config: DrafterConfig, target: DecoderSpec, tensors: Mapping[str, Tensor]
) -> frozenset[str]:
    """The tensors that come from the target: embeddings and head, if absent and of its sizes."""
    shared = set()
    if config.transformer.hidden_size == target.hidden_size:
        if EMBEDDINGS not in tensors:
            shared.add(EMBEDDINGS)
        if HEAD not in tensors and not config.reduced_vocabulary:
            shared.add(HEAD)
    return frozenset(shared)


def _attach_shared(model: DraftModel, target: Decoder, shared: frozenset[str]) -> None:
    if EMBEDDINGS in shared:
        model.embed = target.embed
    if HEAD in shared:
        model.readout.head = target.head


def attach_vocabulary(model: DraftModel, tensors: Mapping[str, Tensor]) -> None:
    """Give a drafter its map to target ids. Raises `InputError` when d2t is missing or wrong."""
    d2t = tensors.get(D2T)
    if not model.config.reduced_vocabulary:
        if d2t is not None and bool(d2t.any()):
            raise InputError(
                "d2t maps draft ids although the draft vocabulary is the full one; set "
                "draft_vocab_size to the number of draft ids"
            )
        return
    if d2t is None:
        raise InputError("a reduced draft vocabulary needs the tensor d2t, which is missing")
    if not _maps_every_draft_id(d2t, model.config):
        raise InputError(
            "d2t does not map every draft id to a target id; it holds offsets, not ids"
        )
    model.readout.d2t = d2t.to(torch.int64)


def vocabulary_doubts(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with a map that `attach_vocabulary` takes; see `vocabulary.doubts`."""
    if not config.reduced_vocabulary:
        return []
    return doubts(tensors[D2T], tensors.get(T2D), config.transformer.vocab_size)


def _maps_every_draft_id(d2t: Tensor, config: DrafterConfig) -> bool:
    if tuple(d2t.shape) != (config.draft_vocab_size,):
        return False
    ids = d2t.to(torch.int64) + torch.arange(len(d2t))
    return bool(((ids >= 0) & (ids < config.transformer.vocab_size)).all())


def save_drafter(
    directory: Path,
    model: DraftModel,
    dtype: torch.dtype = torch.bfloat16,
    shared: frozenset[str] = frozenset(),
) -> None:
    """Write a drafter's directory whole or not at all, replacing an existing one.

    shared: names of tensors to leave out, because the target's are used.
    """
    with replacing_directory(directory) as fresh:
        tensors = {name: value.to(dtype) for name, value in _file_tensors(model, shared).items()}
        tensors.update(_vocabulary_tensors(model))
        save_tensors(fresh / "model.safetensors", tensors)
        text = json.dumps(config_json(model.config, dtype), indent=2) + "\n"
        (fresh / "config.json").write_text(text, encoding="utf-8")
        if model.readout.selector is not None:
            save_selector(fresh, model.readout.selector, model.config, dtype)


def _file_tensors(model: DraftModel, shared: frozenset[str]) -> dict[str, Tensor]:
    tensors = disassemble(model, drafter_rules(model.config, shared))
    if MASK_HIDDEN in tensors:
        tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].view(1, -1)
    return tensors


def _vocabulary_tensors(model: DraftModel) -> dict[str, Tensor]:
    if not model.config.reduced_vocabulary:
        return {}
    kept = model.readout.vocabulary.cpu()
    return {
        D2T: model.readout.d2t.cpu(),
        T2D: membership(kept, model.config.transformer.vocab_size),
    }


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

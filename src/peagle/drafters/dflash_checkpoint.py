"""A DFlash head's directory, in z-lab's layout or speculators': its configuration and tensors."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.drafters.checkpoint import (
    D2T,
    EMBEDDINGS,
    HEAD,
    T2D,
    filled,
    shared_tensors,
    write_network,
)
from peagle.drafters.config_file import SPECULATORS, config_problems, draft_windows, layers_json
from peagle.drafters.correction import selector_rules
from peagle.drafters.dflash import BlockConfig, BlockModel, ConvSpec, default_block_taps
from peagle.drafters.selector import SelectorConfig
from peagle.errors import InputError, about, refuse
from peagle.files import replacing_directory
from peagle.models.ends import Ends
from peagle.models.families import qwen3
from peagle.models.families.config import (
    FULL,
    architecture_of,
    num_layers,
    reading,
    require_positive,
)
from peagle.models.families.tensors import Place
from peagle.models.families.tensors import layer as layer_tensors
from peagle.models.spec import DecoderSpec
from peagle.models.weights import TensorRule, disassemble, mismatches, read_json, read_tensors

ARCHITECTURES = "DFlashDraftModel", "DFlash2DraftModel"
ALGORITHMS = "dflash", "dflash2"
"""Values of `speculators_model_type`."""
NESTED = "dflash_config"
REFUSED = {
    "sample_from_anchor": "the row of the newest token drafts, as DSpark's does",
    "attention_sink_bias": "heads have sinks",
    "attention_value_scale": "values are scaled",
}
"""Keys that change the forward in ways that peagle does not run, and what they say."""
READ = {
    *("mask_token_id", "target_layer_ids", "block_size", "causal", "use_swa", "swa_window_size"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}
"""Keys of `dflash_config` that are read; others may change the forward."""
MASK_EMBEDDING = "mask_embedding.pt"
NEOX = "is_neox_style", "rope_is_neox_style"
BLOCK = 16
"""Rows of a block where nothing is said."""
OF_SELECTOR = re.compile(r"(candidate_selector\.\w+)\.weight")
OF_PROJECTION = re.compile(r"(candidate_selector\.hidden_projection)$")
"""Its one tensor whose published name ends in `weight`."""
Values = Mapping[str, Any]


def is_dflash(directory: Path) -> bool:
    """Whether a directory's `config.json` is that of a DFlash head; not if it cannot be read."""
    try:
        return _names_dflash(read_json(directory / "config.json"))
    except InputError:  # which is told where a head is read
        return False


def _names_dflash(values: Values) -> bool:
    if SPECULATORS in values:
        return values[SPECULATORS] in ALGORITHMS
    return architecture_of(values) in ARCHITECTURES


def read_block_config(directory: Path, target: DecoderSpec) -> BlockConfig:
    """A head's `config.json`. Raises `InputError` for keys that are missing, wrong, or unsupported.

    target: names the aux layers where the file does not.
    """
    with reading(str(directory)):
        if (directory / MASK_EMBEDDING).exists():
            raise InputError(f"{MASK_EMBEDDING}: not supported, a mask of its own; vLLM serves it")
        return _config(read_json(directory / "config.json"), target)


def _config(values: Values, target: DecoderSpec) -> BlockConfig:
    values = {**values, **(values.get("transformer_layer_config") or {})}
    own = {**values, **(values.get(NESTED) or {})}
    for key, told in REFUSED.items():
        if own.get(key):
            raise InputError(f"{key} {own[key]}: {told}, which is not supported; vLLM serves it")
    if any(own.get(key) is False for key in NEOX):
        raise InputError("is_neox_style false: heads turn in pairs of neighbours; vLLM serves it")
    nested = values.get(NESTED) or {}
    for key in sorted(nested.keys() - READ - REFUSED.keys() - set(NEOX)):
        raise InputError(f"dflash_config has {key}, which peagle does not know; vLLM may serve it")
    shape, block = _transformer(values, own), int(own.get("block_size") or BLOCK)
    drafted = int(own.get("draft_vocab_size") or shape.vocab_size)
    require_positive(block_size=block - 1, draft_vocab_size=drafted)
    if "mask_token_id" not in own:
        raise InputError("a DFlash head needs mask_token_id")
    conv = selector = None
    if "conv_kernel_size" in own:  # DFlash 2
        conv = ConvSpec(int(own["conv_kernel_size"]), int(own["conv_group_size"]))
        selector = SelectorConfig(int(own["selector_rank"]), int(own["selector_top_k"]))
    return BlockConfig(
        transformer=shape,
        target_hidden_size=int(own.get("target_hidden_size") or shape.hidden_size),
        taps=_taps(values, own, len(shape.layers), len(target.layers)),
        draft_vocab_size=drafted,
        mask_token_id=int(own["mask_token_id"]),
        block_size=block,
        target_layers=len(target.layers),
        embedding_scale=float(own.get("input_embedding_scale") or 1.0),
        logit_scale=float(own.get("output_multiplier") or 1.0),
        logit_softcap=own.get("final_logit_softcapping"),
        conv=conv,
        selector=selector,
        trained_tokens=block - 1,
    )


def _taps(values: Values, own: Values, layers: int, of_target: int) -> tuple[int, ...]:
    """Aux layers as EAGLE counts them; z-lab names the layer before."""
    if SPECULATORS in values:
        return tuple(int(tap) for tap in values["aux_hidden_state_layer_ids"])
    if (named := own.get("target_layer_ids")) is None:
        return default_block_taps(layers, of_target)
    if list(named) != sorted(named):
        raise InputError(f"target_layer_ids {list(named)} are not ascending, as fc reads them")
    return tuple(int(layer) + 1 for layer in named)


def _transformer(values: Values, own: Values) -> DecoderSpec:
    """The layers: Qwen3's, with the windows and causality that the writers mean."""
    plain = {"layer_types": None, "use_sliding_window": False, "partial_rotary_factor": None}
    rope = values.get("rope_parameters")
    if isinstance(rope, Mapping):
        rope = {k: v for k, v in rope.items() if not k.startswith(("partial_", "mrope_"))}
    spec = qwen3.FAMILY.spec({**values, **plain, "rope_parameters": rope})
    widths = _windows(values, own)
    causal = _causal(values, own, widths)
    layers = [
        replace(layer, mixer=replace(layer.attention, window=width, causal=each))
        for layer, width, each in zip(spec.layers, widths, causal, strict=True)
    ]
    return replace(spec, layers=tuple(layers))


def _windows(values: Values, own: Values) -> list[int | None]:
    if own.get("use_swa"):
        return [int(own["swa_window_size"])] * num_layers(values)
    return draft_windows(values, as_qwen3=True)


def _causal(values: Values, own: Values, widths: list[int | None]) -> list[bool]:
    """Whether each layer is causal, by the first of six ways to say it (vLLM, z-lab, SGLang).

    A sliding layer of z-lab's is causal where nothing else is said, a full one never.
    """
    if (said := values.get("is_causal")) is None and SPECULATORS not in values:
        said = own.get("causal")
    if said is not None:
        return [bool(said)] * len(widths)
    sliding = not own.get("use_swa")
    if SPECULATORS in values:
        sliding = not values.get("sliding_window_non_causal", True)
    return [sliding and width is not None for width in widths]


def block_rules(config: BlockConfig, shared: frozenset[str]) -> list[TensorRule]:
    """Every tensor of a head's file except d2t, t2d and those that are the target's."""
    shape = config.transformer
    width = (shape.hidden_size,)
    rules = [
        TensorRule("embed.weight", (EMBEDDINGS,), (shape.vocab_size,)),
        TensorRule("readout.head.weight", (HEAD,), (config.draft_vocab_size,)),
        TensorRule("fc.weight", ("fc.weight",), width),
        TensorRule("hidden_norm.weight", ("hidden_norm.weight",), width),
        TensorRule("readout.norm.weight", ("norm.weight",), width),
    ]
    for index, layer in enumerate(shape.layers):
        place = Place(f"layers.{index}", f"layers.{index}")
        rules += layer_tensors(layer, shape.hidden_size, place)
        if config.conv is not None:
            rules += _conv_rules(config.conv, shape.hidden_size, place)
    if config.selector is not None:
        within = "readout.selector."
        rules += [replace(rule, ours=within + rule.ours) for rule in selector_rules(config)]
    return [rule for rule in rules if rule.theirs[0] not in shared]


def _conv_rules(conv: ConvSpec, hidden_size: int, place: Place) -> list[TensorRule]:
    added = 2 * conv.taps * hidden_size // conv.group
    return [
        rule
        for name in ("attention_conv", "mlp_conv")
        for rule in (
            place.rule(f"{name}.base", (f"{name}.base_kernel",), (2,)),
            place.rule(
                f"{name}.projection.weight", (f"{name}.kernel_projection.weight",), (added,)
            ),
        )
    ]


def published_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a head, those of its selector under the names that a correction has."""
    return {OF_SELECTOR.sub(r"\1", name): tensor for name, tensor in tensors.items()}


def block_problems(
    config: BlockConfig, target: DecoderSpec, tensors: Mapping[str, Tensor]
) -> list[str]:
    """Everything in a head's directory that does not fit its target, each with a fix."""
    problems = config_problems(config, target, "target_layer_ids", "mask_token_id")
    if tensors and not problems:
        with torch.device("meta"):
            model = BlockModel(config, 1)
        rules = block_rules(config, shared_tensors(config, target, tensors))
        problems += mismatches(model, rules, tensors, (D2T, T2D))
    return problems


def read_dflash(directory: Path, target: Ends, max_length: int | None = None) -> BlockModel:
    """A head, which shares with its target what its own file leaves out.

    max_length: as of `read_drafter`. Raises `InputError` naming every problem.
    """
    if not _names_dflash(read_json(directory / "config.json")):
        raise InputError(f"{directory} is no DFlash head; give method eagle3")
    config = read_block_config(directory, target.spec)
    tensors = published_names(read_tensors(directory))
    refuse(f"{directory} does not fit its target", block_problems(config, target.spec, tensors))
    with torch.device("meta"):
        model = BlockModel(config, max_length or target.max_length)
    with about(directory):
        return filled(model, target, tensors, block_rules)


def save_dflash(
    directory: Path,
    model: BlockModel,
    dtype: torch.dtype = torch.bfloat16,
    shared: frozenset[str] = frozenset(),
) -> None:
    """Write a head's directory in z-lab's layout. Otherwise as `save_drafter`."""
    tensors = disassemble(model, block_rules(model.config, shared))
    named = {OF_PROJECTION.sub(r"\1.weight", name): value for name, value in tensors.items()}
    with replacing_directory(directory) as fresh:
        write_network(fresh, model, named, block_json(model.config, dtype), dtype)


def block_json(config: BlockConfig, dtype: torch.dtype) -> dict[str, Any]:
    """A head's `config.json` in z-lab's layout."""
    layers, conv, selector = config.transformer.attention.values(), config.conv, config.selector
    own = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [tap - 1 for tap in config.taps],
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.logit_scale,
        "final_logit_softcapping": config.logit_softcap,
    }
    if conv is not None:
        own |= {"conv_kernel_size": conv.taps, "conv_group_size": conv.group}
    if selector is not None:
        own |= {"selector_rank": selector.rank, "selector_top_k": selector.candidates}
    values = {
        "architectures": [ARCHITECTURES[conv is not None]],
        "layer_types": [FULL] * len(layers),
        "num_target_layers": config.target_layers,
        **layers_json(config, dtype),
        NESTED: own,
    }
    if any(each.causal != (each.window is not None) for each in layers):
        values["is_causal"] = config.attention.causal  # of all layers, or no file had said it
    return values

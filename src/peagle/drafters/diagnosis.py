"""What a drafter's directory holds, whether it fits a target, and everything wrong with it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from peagle.drafters.checkpoint import (
    D2T,
    MASK_HIDDEN,
    T2D,
    WHOLE_MODEL,
    draft_offsets,
    drafter_rules,
    feature_problems,
    is_whole_model,
    kind_problems,
    normalised,
    shared_tensors,
    vocabulary_doubts,
)
from peagle.drafters.config_file import config_problems, read_drafter_config
from peagle.drafters.correction import FOLDER, selector_problems
from peagle.drafters.dflash_checkpoint import block_problems, published_names, read_block_config
from peagle.drafters.kind import DFLASH, MTP, PEAGLE, Kind
from peagle.drafters.methods import kind_shown
from peagle.drafters.model import DrafterConfig, DraftModel, default_taps
from peagle.drafters.mtp import check_mtp
from peagle.drafters.network import NetworkConfig
from peagle.errors import InputError
from peagle.models.families import has_family, read_spec
from peagle.models.families.config import architecture_of
from peagle.models.foreign import read_target_spec
from peagle.models.generation_config import end_tokens, sampling_defaults
from peagle.models.loading import check_decoder
from peagle.models.quantization import read_quantization
from peagle.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MLPSpec
from peagle.models.tokenizer import load_tokenizer
from peagle.models.vllm_support import serving_flags
from peagle.models.weights import (
    finite,
    mismatches,
    read_json,
    read_tensor_file,
    read_tensors,
    safetensors_files,
    shortened,
)

T = TypeVar("T")
UNKNOWN_TARGET = DecoderSpec(1, 1, 1_000 * (LayerSpec(AttentionSpec(1, 1, 1), MLPSpec(1)),))
"""Stands in for a target while a configuration is read; deep enough for any aux layer."""


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a drafter's directory."""

    facts: Mapping[str, str]
    """What the drafter is, as far as it could be read: label -> value."""
    problems: tuple[str, ...]
    """What is wrong, each with a fix; if empty, the drafter will load."""
    config: NetworkConfig | None
    """Its configuration as it will run; None if that could not be read."""


def diagnose(directory: Path, target: Path | None = None, kind: Kind | None = None) -> Diagnosis:
    """Examine a drafter, alone or beside the target it is meant for.

    kind: what it is to run as, as the flags --peagle and --eagle3 say; None: whatever it is. Never
    raises `InputError`: what cannot be read is one of the problems.
    """
    problems: list[str] = []
    shape = None if target is None else _attempt(lambda: read_target_spec(target), problems)
    shown = kind_shown(directory)
    if shown is MTP:
        return diagnose_mtp(directory, target, kind)
    if shown is DFLASH:
        return _diagnose_block(directory, shape, kind, problems)
    config = _attempt(lambda: _read_drafter(directory, shape), problems)
    stored = _read_tensors(directory, problems)
    tensors = _attempt(lambda: normalised(stored), problems) or {}
    if is_whole_model(tensors):
        problems = [WHOLE_MODEL]
        config = None
    if config is None:
        return Diagnosis(_weight_facts(tensors), tuple(problems), None)
    if tensors:
        problems += kind_problems(config, tensors, kind)
    shape = shape or _implied_target(config)
    problems += config_problems(config, shape)
    if tensors:
        misread = feature_problems(config, tensors)
        unfit = partial(_tensor_problems, directory, config, shape, tensors)
        problems += misread or _attempt(unfit, problems) or []
    if config.selector is not None:
        corrections = _attempt(lambda: read_tensors(directory / FOLDER), problems)
        problems += [] if corrections is None else selector_problems(config, corrections)
    facts = {**_config_facts(config, tensors), **_weight_facts(tensors)}
    return Diagnosis(facts, tuple(problems), config)


def _diagnose_block(
    directory: Path, shape: DecoderSpec | None, kind: Kind | None, problems: list[str]
) -> Diagnosis:
    """The same of a DFlash head. shape: the target's; problems: those that are known."""
    config = _attempt(lambda: read_block_config(directory, shape or UNKNOWN_TARGET), problems)
    tensors = published_names(_read_tensors(directory, problems))
    if config is None:
        return Diagnosis(_weight_facts(tensors), tuple(problems), None)
    if kind not in (None, DFLASH):
        problems.append(f"its kind is {config.kind.name}, not {kind.name}; give it as --drafter")
    problems += block_problems(config, shape or _implied_target(config), tensors)
    problems += _vocabulary_problems(config, tensors) if tensors else []
    transformer = config.transformer
    sees = {each.causal: None for each in transformer.attention.values()}
    way = " and ".join("causal" if causal else "both ways" for causal in sees)
    taps = _listed(config.taps)
    facts = {
        **_size_facts(config, f"{_window_fact(transformer)}, blocks seen {way}", taps),
        "method": _method(config.kind) + (", version 2" if config.conv is not None else ""),
        "block": f"{config.block_size} rows, so K is at most {config.most_tokens}",
        **_weight_facts(tensors),
    }
    return Diagnosis(facts, tuple(problems), config)


def foreign_facts(target: Path) -> dict[str, str]:
    """Who runs a target that peagle trains drafters for but does not run; else nothing."""
    if has_family(target):
        return {}
    architecture = architecture_of(read_json(target / "config.json"))
    flags = serving_flags(target)
    runs = "no" if flags is None else f"with {' '.join(flags)}" if flags else "yes"
    return {"target": f"{architecture}: not run by peagle; vLLM runs it: {runs}"}


def diagnose_mtp(
    directory: Path, target: Path | None = None, kind: Kind | None = None
) -> Diagnosis:
    """The same of a target's own head, in the target's directory or in one of its own."""
    problems: list[str] = []
    if kind not in (None, MTP):
        problems.append(f"its kind is {MTP.name}, not {kind.name}; give it as --drafter")
    found = _attempt(lambda: check_mtp(directory, target or directory), problems)
    config, tensors = found or (None, {})
    return Diagnosis({"method": _method(MTP), **_weight_facts(tensors)}, tuple(problems), config)


def target_problems(directory: Path, lora: str | None = None) -> list[str]:
    """What keeps a target from being served, except a config.json that `diagnose` reports.

    lora: an adapter that is to be merged into it.
    """
    problems: list[str] = []
    if _attempt(lambda: read_spec(directory), []) is not None:
        _attempt(lambda: check_decoder(directory, lora), problems)
        _attempt(lambda: load_tokenizer(directory), problems)
        _attempt(lambda: end_tokens(directory, None), problems)
        _attempt(lambda: sampling_defaults(directory), problems)
    return problems


def _attempt(read: Callable[[], T], problems: list[str]) -> T | None:
    """The value read, or None after adding a problem."""
    try:
        return read()
    except InputError as error:
        problems.append(str(error))
        return None


def _read_drafter(directory: Path, target: DecoderSpec | None) -> DrafterConfig:
    if target is not None:
        return read_drafter_config(directory, target)
    own = read_drafter_config(directory, UNKNOWN_TARGET).transformer
    return read_drafter_config(directory, _as_deep_as_unknown(own))


def _as_deep_as_unknown(shape: DecoderSpec) -> DecoderSpec:
    return replace(shape, layers=UNKNOWN_TARGET.layers)


def _implied_target(config: NetworkConfig) -> DecoderSpec:
    """The target that a drafter's own configuration implies."""
    return replace(_as_deep_as_unknown(config.transformer), hidden_size=config.target_hidden_size)


def _read_tensors(directory: Path, problems: list[str]) -> dict[str, Tensor]:
    """The tensors of every readable file; unreadable files and bad values become problems."""
    tensors: dict[str, Tensor] = {}
    for file in _attempt(lambda: safetensors_files(directory), problems) or []:
        tensors |= _attempt(partial(read_tensor_file, file), problems) or {}
    broken = [name for name, value in tensors.items() if not finite(value)]
    if broken:
        problems.append(
            f"NaN or infinite values in {shortened(broken)}; use a checkpoint from before training "
            "diverged"
        )
    return tensors


def _tensor_problems(
    directory: Path, config: DrafterConfig, target: DecoderSpec, tensors: Mapping[str, Tensor]
) -> list[str]:
    """What is missing, unexpected or misshapen compared with `config.json`.

    Raises `InputError` for formats of weights that are not supported.
    """
    quantization = read_quantization(directory)
    with torch.device("meta"):
        model = DraftModel(config, 1)
    shared = shared_tensors(config, target, tensors)
    rules = [quantization.as_stored(rule, tensors) for rule in drafter_rules(config, shared)]
    rules = [rule for rule in rules if rule.theirs != (MASK_HIDDEN,) or MASK_HIDDEN in tensors]
    named_already = [] if config.kind is PEAGLE else [MASK_HIDDEN]
    known = [D2T, T2D, *named_already, *quantization.ignored(tensors)]
    problems = mismatches(model, rules, tensors, known)
    if problems:
        advice = "export it again with the config.json of its training"
        problems = [f"{'; '.join(problems)}; {advice}"]
    return problems + _vocabulary_problems(config, tensors)


def _vocabulary_problems(config: NetworkConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with the map from draft ids to target ids."""
    problems: list[str] = []
    _attempt(lambda: draft_offsets(config, tensors), problems)
    return problems or vocabulary_doubts(config, tensors)


def _config_facts(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    style = "Qwen3" if config.attention.qk_norm else "Llama"
    return {
        **_size_facts(
            config, f", {style}-style{_window_fact(config.transformer)}", _taps_fact(config)
        ),
        "trained for K": "not stated" if not config.trained_tokens else str(config.trained_tokens),
        "correction": _correction(config),
    }


def _size_facts(config: NetworkConfig, layers: str, taps: str) -> dict[str, str]:
    """What is told of every head. layers: what of its layers beside their number."""
    shape, mask = config.transformer, config.mask_token_id
    return {
        "method": _method(config.kind),
        "layers": f"{len(shape.layers)}{layers}",
        "hidden size": f"{shape.hidden_size} (target {config.target_hidden_size})",
        "vocabulary": f"{shape.vocab_size:,}",
        "draft vocabulary": f"{config.draft_vocab_size:,}",
        "aux layers": taps,
        "mask token id": "none" if mask is None else str(mask),
    }


def _method(kind: Kind) -> str:
    return f"{kind.name}: {kind.passes}"


def _taps_fact(config: DrafterConfig) -> str:
    if config.taps_named:
        return _listed(config.taps)
    implied = config.taps == default_taps(len(UNKNOWN_TARGET.layers))
    taken = "2, N/2, N-3 of the target's N" if implied else _listed(config.taps)
    return f"{taken} (vLLM's default; the file names none)"


def _window_fact(shape: DecoderSpec) -> str:
    """How many of the layers have a window; vLLM serves P-EAGLE only with all or none."""
    widths = [each.window for each in shape.attention.values() if each.window]
    if not widths:
        return ""
    count = "all" if len(widths) == len(shape.layers) else f"{len(widths)} of them"
    return f", {count} with a window of {widths[0]:,}"


def _correction(config: DrafterConfig) -> str:
    selector = config.selector
    if selector is None:
        return "none"
    return f"a selector of rank {selector.rank} over {selector.candidates} drafts ({FOLDER}/)"


def _weight_facts(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    if not tensors:
        return {}
    weights = [x for name, x in tensors.items() if x.is_floating_point() and "_scale" not in name]
    packed = [math.prod(x.tolist()) for name, x in tensors.items() if name.endswith("weight_shape")]
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in weights})
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        "dtype": ", ".join(dtypes + ["packed integers"] * bool(packed)),
        "parameters": f"{sum(tensor.numel() for tensor in weights) + sum(packed):,}",
        "size": f"{size / 2**20:.1f} MiB",
    }


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))

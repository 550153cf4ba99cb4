"""A drafter's directory in vLLM's layout: strict reading of its tensors, and writing all of it."""

import json
import re
import warnings
from collections.abc import Callable, Mapping
from copy import copy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from peagle.drafters.config_file import (
    NO_MASK_TOKEN,
    TAPS_KEY,
    config_json,
    config_problems,
    read_drafter_config,
)
from peagle.drafters.correction import FOLDER, save_selector, selector_problems, selector_rules
from peagle.drafters.kind import PEAGLE, Kind
from peagle.drafters.model import DrafterConfig, DraftModel
from peagle.drafters.network import Network, NetworkConfig
from peagle.drafters.vocabulary import doubts, membership
from peagle.errors import InputError, about, refuse
from peagle.files import replacing_directory
from peagle.models.ends import Ends
from peagle.models.families.tensors import Place
from peagle.models.families.tensors import layer as layer_tensors
from peagle.models.formats.layout import PackedRule
from peagle.models.quantization import Quantization, read_quantization
from peagle.models.spec import DecoderSpec
from peagle.models.weights import (
    TensorRule,
    assemble,
    disassemble,
    read_json,
    read_tensors,
    write_model,
)
from peagle.ops.linear import Linear
from peagle.ops.packing import pack
from peagle.ops.weight import dense, widen
from peagle.speculative_config import DrafterFormat

N = TypeVar("N", bound=Network)
PLAIN = Quantization()
MASK_HIDDEN, D2T, T2D = "mask_hidden", "d2t", "t2d"
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"
WHOLE_MODEL = "it is a whole language model, not a drafter; give it as the target"


def drafter_rules(config: DrafterConfig, shared: frozenset[str] = frozenset()) -> list[TensorRule]:
    """Every tensor of a drafter's file except d2t, t2d and the `shared` ones."""
    shape, width = config.transformer, config.transformer.hidden_size
    sizes = {
        ("embed.weight", EMBEDDINGS): shape.vocab_size,
        ("readout.head.weight", HEAD): config.draft_vocab_size,
        ("fc.weight", "fc.weight"): width,
        ("readout.norm.weight", "norm.weight"): width,
        ("first.hidden_norm.weight", "layers.0.hidden_norm.weight"): width,
    }
    if config.norm_before_fc:
        sizes["feature_norm.weight", "input_norm.weight"] = config.feature_size
    for i in range(len(config.taps) if config.fc_norm else 0):
        sizes[f"tap_norms.{i}.weight", f"fc_norm.{i}.weight"] = config.target_hidden_size
    if config.kind is PEAGLE:
        sizes[MASK_HIDDEN, MASK_HIDDEN] = config.feature_size
    rules = [TensorRule(ours, (theirs,), (size,)) for (ours, theirs), size in sizes.items()]
    for index, layer in enumerate(shape.layers):
        place = Place(f"rest.{index - 1}" if index else "first", f"layers.{index}")
        rules += layer_tensors(layer, width, place)
    return [rule for rule in rules if rule.theirs[0] not in shared]


def ready(model: N, quantization: DrafterFormat | None) -> N:
    """A network for inference, rounded if asked."""
    model.requires_grad_(False).eval()
    if quantization is not None:
        model.quantize()
    pack(model)
    return model


def read_drafter(
    directory: Path, target: Ends, kind: Kind | None = None, max_length: int | None = None
) -> DraftModel:
    """A drafter, which shares with its target what its own file leaves out.

    kind: what it is to run as; None: whatever the files hold. max_length: positions that it is to
    have; None: as many as the target. Raises `InputError` naming every problem: wrong
    configuration, missing, unexpected or misshapen tensors, another kind.
    """
    config = read_drafter_config(directory, target.spec)
    tensors = normalised(read_tensors(directory))
    if is_whole_model(tensors):
        raise InputError(f"{directory}: {WHOLE_MODEL}")
    problems = config_problems(config, target.spec) + kind_problems(config, tensors, kind)
    problems += feature_problems(config, tensors)
    refuse(f"{directory} does not fit its target", problems)
    corrections = read_tensors(directory / FOLDER) if config.selector else {}
    if config.selector and (problems := selector_problems(config, corrections)):
        raise InputError(f"{directory}: {problems[0]}")
    with torch.device("meta"):
        model = DraftModel(config, max_length or target.max_length)
    with about(directory):
        if model.readout.selector is not None:
            like = target.embed.weight
            rules = selector_rules(config)
            assemble(model.readout.selector, rules, corrections, (), like.dtype, like.device)
        filled(model, target, tensors, drafter_rules, read_quantization(directory))
    for doubt in vocabulary_doubts(config, tensors) + tap_doubts(config):
        warnings.warn(f"{directory}: {doubt}", stacklevel=2)
    return model


def filled(
    model: N,
    target: Ends,
    tensors: Mapping[str, Tensor],
    rules_of: Callable[[Any, frozenset[str]], list[TensorRule]],
    quantization: Quantization = PLAIN,
) -> N:
    """A network with the values of its file's tensors, and what it leaves out from its target.

    rules_of: a network's configuration and the names of what is left out -> all other tensors.
    quantization: the formats of the file's weights, which are widened: a small network in few bits
    would be slow on a CPU, and could not be trained.
    """
    like, shared = target.embed.weight, shared_tensors(model.config, target.spec, tensors)
    rules = [quantization.as_stored(rule, tensors) for rule in rules_of(model.config, shared)]
    known = {D2T, T2D} | quantization.ignored(tensors)
    assemble(model, rules, tensors, known, like.dtype, like.device)
    widen(model, like.dtype)
    attach_shared(model, target, shared)
    if (offsets := draft_offsets(model.config, tensors)) is not None:
        model.readout.d2t = offsets
    return model.to(device=like.device, dtype=like.dtype)


def unpacked(directory: Path, copy: Path) -> Path:
    """A drafter's directory that vLLM reads: where products are in packed integers, a copy of it in
    which they are in bfloat16, without a selector."""
    config, shape = read_json(directory / "config.json"), "weight_shape"
    tensors = read_tensors(directory) if config.pop("quantization_config", None) else {}
    packed = tuple(name.removesuffix(shape) for name in tensors if name.endswith(shape))
    if not packed:
        return directory
    plain = {name: own for name, own in tensors.items() if not name.startswith(packed)}
    quantization = read_quantization(directory)
    for begin in packed:
        name, sizes = f"{begin}weight", tuple(map(int, tensors[begin + shape]))
        layout = quantization.layout_of(name, tensors)
        assert layout is not None
        rule = PackedRule.of(TensorRule(name, (name,), sizes[:1]), layout)
        weight = rule.join([tensors[own] for own in rule.theirs], sizes, None)
        plain[name] = dense(weight).to(torch.bfloat16)
    with replacing_directory(copy) as fresh:
        write_model(fresh, plain, config)
    return copy


def is_whole_model(tensors: Mapping[str, Tensor]) -> bool:
    """Whether tensors are a target's."""
    return "fc.weight" not in tensors and "model.embed_tokens.weight" in tensors


def normalised(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensor names as vLLM sees them: `midlayer` is layer 0, `mask_hidden` is flat.

    NeMo's training checkpoints have all but the head below `model`.
    """
    above = "model." if "model.fc.weight" in tensors else ""
    renamed = {
        re.sub(r"^midlayer\.", "layers.0.", name.removeprefix(above)): tensor
        for name, tensor in tensors.items()
    }
    if len(renamed) < len(tensors):
        raise InputError("it has one tensor under two names (midlayer and layers.0); remove one")
    if MASK_HIDDEN in renamed:
        renamed[MASK_HIDDEN] = renamed[MASK_HIDDEN].reshape(-1)
    return renamed


def kind_problems(
    config: DrafterConfig, tensors: Mapping[str, Tensor], kind: Kind | None
) -> list[str]:
    """What is wrong if the files are not of the kind that they are to run as, or of none whole.

    kind: None: whatever they are.
    """
    if MASK_HIDDEN in tensors and config.kind is not PEAGLE:
        return [f"it has {MASK_HIDDEN}: {NO_MASK_TOKEN}"]
    if MASK_HIDDEN not in tensors and config.kind is PEAGLE:
        return [
            f"its config.json says that it is a P-EAGLE drafter, and its files have no "
            f"{MASK_HIDDEN}; export it again"
        ]
    if kind not in (None, config.kind):
        own, way = config.kind, f"its kind is {config.kind.name}, not {kind.name};"
        asked = json.dumps(own.parallel_drafting)
        return [f"{way} set parallel_drafting to {asked}; bench takes it as --{own.method}"]
    return []


def feature_problems(config: DrafterConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong if `fc` reads another number of target layers than the configuration has."""
    fc, width = tensors.get("fc.weight"), config.target_hidden_size
    if fc is None or fc.ndim != 2 or fc.shape[1] % width or fc.shape[1] == config.feature_size:
        return []
    said = "lists" if config.taps_named else "names none, by default"
    return [
        f"it {said} {len(config.taps)} aux layers, and its fc reads {fc.shape[1] // width}; name "
        f"those of its training in {TAPS_KEY}"
    ]


def tap_doubts(config: DrafterConfig) -> list[str]:
    """That the drafter may read other layers of the target than it was trained for."""
    if config.taps_named:
        return []
    return [f"it names no aux layers, so {list(config.taps)} are taken, vLLM's default"]


def shared_tensors(
    config: NetworkConfig, target: DecoderSpec, tensors: Mapping[str, Tensor]
) -> frozenset[str]:
    """The tensors that come from the target: embeddings and head, if absent and of its sizes."""
    shared = set()
    if config.transformer.hidden_size == target.hidden_size:
        if EMBEDDINGS not in tensors:
            shared.add(EMBEDDINGS)
        if not (config.reduced_vocabulary or any(name.startswith("lm_head.") for name in tensors)):
            shared.add(HEAD)
    return frozenset(shared)


def attach_shared(model: Network, target: Ends, shared: frozenset[str]) -> None:
    """Give a drafter what is its target's."""
    if EMBEDDINGS in shared:
        model.embed = target.embed
    if HEAD in shared:
        model.readout.head = head_for_drafts(target)


def head_for_drafts(target: Ends) -> Linear:
    """The target's head; of sums in any order, since no token depends on drafts."""
    if not target.batch_invariant:
        return target.head
    head = copy(target.head)  # of the same weight
    head.batch_invariant = False
    return head


def draft_offsets(config: NetworkConfig, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """What is added to each draft id to make it a target id; None: it is one.

    Raises `InputError` when d2t is missing or wrong.
    """
    d2t = tensors.get(D2T)
    if not config.reduced_vocabulary:
        if d2t is not None and bool(d2t.any()):
            raise InputError(
                "d2t maps draft ids although the draft vocabulary is the full one; set "
                "draft_vocab_size to the number of draft ids"
            )
        return None
    if d2t is None:
        raise InputError("a reduced draft vocabulary needs the tensor d2t, which is missing")
    if not _maps_every_draft_id(d2t, config):
        raise InputError(
            "d2t does not map every draft id to a target id; it holds offsets, not ids"
        )
    return d2t.to(torch.int64)


def vocabulary_doubts(config: NetworkConfig, tensors: Mapping[str, Tensor]) -> list[str]:
    """What is wrong with a map that `draft_offsets` takes; see `vocabulary.doubts`."""
    if not config.reduced_vocabulary:
        return []
    return doubts(tensors[D2T], tensors.get(T2D), config.transformer.vocab_size)


def _maps_every_draft_id(d2t: Tensor, config: NetworkConfig) -> bool:
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
        tensors = disassemble(model, drafter_rules(model.config, shared))
        if MASK_HIDDEN in tensors:
            tensors[MASK_HIDDEN] = tensors[MASK_HIDDEN].view(1, -1)
        write_network(fresh, model, tensors, config_json(model.config, dtype), dtype)
        if model.readout.selector is not None:
            save_selector(fresh, model.readout.selector, model.config, dtype)


def write_network(
    directory: Path,
    model: Network,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    dtype: torch.dtype,
) -> None:
    """Write a network's tensors, in a dtype, its vocabulary, and its `config.json`."""
    stored = {name: value.to(dtype) for name, value in tensors.items()}
    write_model(directory, stored | _vocabulary_tensors(model), config)


def _vocabulary_tensors(model: Network) -> dict[str, Tensor]:
    if not model.config.reduced_vocabulary:
        return {}
    kept = model.readout.vocabulary.cpu()
    return {
        D2T: model.readout.d2t.cpu(),
        T2D: membership(kept, model.config.transformer.vocab_size),
    }

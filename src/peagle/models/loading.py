"""A target's directory -> our decoder, whole or in parts."""

import warnings
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peagle.device import require_memory
from peagle.errors import InputError
from peagle.models.decoder import Decoder, DecoderLayer, decoder_layer
from peagle.models.families import Family, decoder_rules, end_rules, layer_rules, read_family
from peagle.models.families.tensors import HEAD, embeddings
from peagle.models.spec import DecoderSpec
from peagle.models.weights import (
    TensorRule,
    about,
    assemble,
    file_names,
    mismatches,
    read_tensors,
    refuse,
    tensor_names,
    unexpected,
)
from peagle.ops.packing import pack

LENGTHEN = (
    "lower it, or give the target's config.json a rope_scaling as its model card says (yarn "
    "reaches factor times original_max_position_embeddings)"
)
"""What helps where a context is too short."""


def load_decoder(
    directory: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = None
) -> Decoder:
    """A target from its Hugging Face directory, ready for inference.

    Raises `InputError` for an unsupported architecture, a context beyond the target's, and damaged
    or mismatched weights.
    """
    family, spec = _read_target(directory)
    check_length(spec, max_length or 1)
    with torch.device("meta"):
        decoder = Decoder(spec, max_length)
    parameters = {id(value): value.numel() for value in decoder.parameters()}
    require_memory(sum(parameters.values()) * dtype.itemsize, device, f"the weights of {directory}")
    tensors = read_tensors(directory)
    ignored = _ignored(family, spec, tensors)
    rules = decoder_rules(family, spec)
    return _filled(decoder, rules, tensors, ignored, directory, dtype, device)


def check_length(spec: DecoderSpec, max_model_len: int) -> None:
    """Raise `InputError` for a context that the target's positions do not reach."""
    if max_model_len > spec.max_length:
        raise InputError(
            f"max_model_len {max_model_len} is above the target's {spec.max_length}; {LENGTHEN}"
        )


def check_decoder(directory: Path) -> None:
    """Check a target's tensors against its configuration, without reading the layers' values.

    Raises `InputError` as `load_decoder` does, except for NaN or infinite values.
    """
    (family, spec), tensors = _read_target(directory), read_tensors(directory)
    with torch.device("meta"):
        decoder = Decoder(spec, 1)
    rules = _as_stored(decoder_rules(family, spec), tensors)
    with about(directory):
        refuse(mismatches(decoder, rules, tensors, _ignored(family, spec, tensors)))


def load_ends(
    directory: Path, dtype: torch.dtype, device: torch.device, max_length: int | None = 1
) -> Decoder:
    """A target's embeddings, final norm and head, without the layers between them.

    Raises `InputError` as `load_decoder` does.
    """
    family, spec = _read_target(directory)
    with torch.device("meta"):
        decoder = Decoder(spec, max_length)
    decoder.layers = nn.ModuleList()
    rules = end_rules(family, spec)
    tensors = read_tensors(directory, file_names(rules))
    return _filled(decoder, rules, tensors, set(), directory, dtype, device)


def load_layers(
    directory: Path, dtype: torch.dtype, device: torch.device
) -> Iterator[DecoderLayer]:
    """The layers that `load_ends` leaves out, one by one, for devices that cannot hold them all.

    Raises `InputError` as `load_decoder` does.
    """
    (family, spec), names = _read_target(directory), tensor_names(directory)
    rules = _as_stored(decoder_rules(family, spec), names)
    with about(directory):
        refuse(unexpected(rules, names, _ignored(family, spec, names)))
    for index, of_layer in enumerate(spec.layers):
        rules = _as_stored(layer_rules(family, spec, index, "0"), names)
        with torch.device("meta"):
            layer = decoder_layer(of_layer, spec.hidden_size)
        tensors = read_tensors(directory, file_names(rules))
        with about(directory):
            assemble(nn.ModuleList([layer]), rules, tensors, dtype=dtype, device=device)
        yield layer.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _read_target(directory: Path) -> tuple[Family, DecoderSpec]:
    """A target's family, and what its configuration and its files say together.

    Full fine-tuning of a tied model may leave a head of its own, which transformers keeps.
    """
    family, spec = read_family(directory)
    if spec.tie_word_embeddings and _has_own_head(directory, family):
        warnings.warn(
            f"{directory}: config.json ties the head to the embeddings, but its files hold another "
            "head; this one is used, as by transformers (vLLM drops it); set tie_word_embeddings "
            "to false",
            stacklevel=2,
        )
        spec = replace(spec, tie_word_embeddings=False)
    return family, spec


def _has_own_head(directory: Path, family: Family) -> bool:
    """Whether files hold both, and they differ."""
    embedding = embeddings(family.PREFIX)
    found = read_tensors(directory, {embedding, HEAD})
    if len(found) < 2:
        return False
    return not torch.equal(found[HEAD].to(found[embedding].dtype), found[embedding])


def _as_stored(rules: Iterable[TensorRule], names: Container[str]) -> list[TensorRule]:
    """The rules for a file with these tensors."""
    return [rule.as_stored(names) for rule in rules]


def _ignored(family: Family, spec: DecoderSpec, names: Iterable[str]) -> set[str]:
    """Those of a file's tensors that are not needed but allowed."""
    others = {name for name in names if name.startswith(family.IGNORED)}
    return others | {HEAD} if spec.tie_word_embeddings else others


def _filled(
    decoder: Decoder,
    rules: Iterable[TensorRule],
    tensors: Mapping[str, Tensor],
    ignored: Iterable[str],
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """A decoder with the values of a directory's tensors."""
    spec = decoder.spec
    with about(directory):
        assemble(decoder, _as_stored(rules, tensors), tensors, ignored, dtype, device)
    if spec.tie_word_embeddings:
        decoder.head.weight = decoder.embed.weight
    decoder = decoder.to(device=device, dtype=dtype).requires_grad_(False).eval()
    pack(decoder)
    return decoder

"""A target's directory -> our decoder, whole or in parts."""

import warnings
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from peagle.device import free_memory, gib, require_memory
from peagle.errors import InputError, about, refuse
from peagle.models.adapter import Adapter
from peagle.models.decoder import Decoder, DecoderLayer, decoder_layer
from peagle.models.families import decoder_rules, end_rules, layer_rules, read_family
from peagle.models.families.family import Family
from peagle.models.families.tensors import embeddings, head
from peagle.models.kv_scales import set_kv_scales
from peagle.models.quantization import Quantization, read_quantization
from peagle.models.spec import DecoderSpec
from peagle.models.weights import (
    MISMATCH,
    TensorRule,
    assemble,
    bytes_of,
    file_names,
    known_names,
    mismatches,
    read_tensors,
    tensor_names,
    unexpected,
)
from peagle.ops.packing import pack
from peagle.ops.weight import QuantizedWeight, weights_of, widen

M = TypeVar("M", bound=nn.Module)
LENGTHEN = (
    "lower it, or give the target's config.json a rope_scaling as its model card says (yarn "
    "reaches factor times original_max_position_embeddings)"
)
"""What helps where a context is too short."""


def load_decoder(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int | None = None,
    lora: str | None = None,
) -> Decoder:
    """A target from its Hugging Face directory, ready for inference.

    lora: directory or hub id of an adapter that is merged into its weights. Raises `InputError` for
    an unsupported architecture, a context beyond the target's, and damaged or mismatched weights.
    """
    target = _Target.read(directory, lora)
    check_length(target.spec, max_length or 1)
    decoder, tensors = target.without_values(max_length), read_tensors(directory)
    rules = target.rules(tensors)
    require_memory(bytes_of(rules, decoder, dtype), device, f"the weights of {directory}")
    return target.filled(decoder, rules, tensors, dtype, device)


def widen_on_cpu(module: nn.Module, like: Tensor, spare: int = 0) -> None:
    """Give a CPU plain weights in the type of `like`, where its memory has room for them.

    Where it has none, a warning says so: each product widens a packed weight anew there, which
    takes some thirty times as long. spare: bytes of that memory that are for others.
    """
    packed = (weight for weight in weights_of(module) if isinstance(weight, QuantizedWeight))
    # that of a product is kept once more, laid out for it
    copies = ((1 if len(weight.shape) == 3 else 2) * weight.numel() for weight in packed)
    needed = like.itemsize * sum(copies) if like.device.type == "cpu" else 0
    if not needed:
        return
    free = max(free_memory(like.device) - spare, 0)
    if needed <= free:
        widen(module, like.dtype)
        pack(module.requires_grad_(False))
        return
    less = ", or take dtype bfloat16 (half as much)" if like.dtype == torch.float32 else ""
    warnings.warn(
        f"packed weights stay packed, which is slow on a CPU: widened they take {gib(needed)} GiB, "
        f"and {gib(free)} are free besides keys and values; free memory{less}",
        stacklevel=3,
    )


def check_length(spec: DecoderSpec, max_model_len: int) -> None:
    """Raise `InputError` for a context that the target's positions do not reach."""
    if max_model_len > spec.max_length:
        raise InputError(
            f"max_model_len {max_model_len} is above the target's {spec.max_length}; {LENGTHEN}"
        )


def check_decoder(directory: Path, lora: str | None = None) -> None:
    """Check a target's tensors against its configuration, without reading the layers' values.

    lora: as in `load_decoder`, whose `InputError`s are raised except for NaN or infinite values.
    """
    target, tensors = _Target.read(directory, lora), read_tensors(directory)
    decoder, rules = target.without_values(1), target.rules(tensors)
    with about(directory):
        refuse(MISMATCH, mismatches(decoder, rules, tensors, target.ignored(tensors)))


def load_ends(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int | None = 1,
    lora: str | None = None,
) -> Decoder:
    """A target's embeddings, final norm and head, without the layers between them.

    Takes and raises what `load_decoder` does.
    """
    target, names = _Target.read(directory, lora), tensor_names(directory)
    decoder = target.without_values(max_length)
    decoder.layers = nn.ModuleList()
    rules = target.as_stored(end_rules(target.family, target.spec), names)
    tensors = read_tensors(directory, file_names(rules))
    return target.filled(decoder, rules, tensors, dtype, device)


def load_layers(
    directory: Path, dtype: torch.dtype, device: torch.device, lora: str | None = None
) -> Iterator[DecoderLayer]:
    """The layers that `load_ends` leaves out, one by one, for devices that cannot hold them all.

    Takes and raises what `load_decoder` does.
    """
    target, names = _Target.read(directory, lora), tensor_names(directory)
    family, spec = target.family, target.spec
    with about(directory):
        refuse(MISMATCH, unexpected(target.rules(names), names, target.ignored(names)))
    for index, of_layer in enumerate(spec.layers):
        rules = target.as_stored(layer_rules(family, spec, index, "0"), names)
        with torch.device("meta"):
            layer = decoder_layer(of_layer, spec.hidden_size)
        tensors = read_tensors(directory, file_names(rules))
        with about(directory):
            assemble(nn.ModuleList([layer]), rules, tensors, (), dtype, device, target.adapted)
        _settled(nn.ModuleList([layer]), rules, dtype, device)
        yield layer


@dataclass(frozen=True)
class Stored:
    """Bytes that a target's weights take in memory."""

    ends: int
    """Embeddings, final norm and head."""
    layers: int


def stored_bytes(directory: Path, dtype: torch.dtype, widened: bool = False) -> Stored:
    """Memory of a target, of whose tensors the names alone are needed: those of an index will do.

    Where there are none, as of one on the hub whose files are not fetched, nothing is packed.
    widened: whether nothing is, whatever its files hold.
    """
    target = _Target(directory, *read_family(directory), read_quantization(directory))
    decoder, rules = target.without_values(1), target.rules(known_names(directory))
    if widened:
        rules = decoder_rules(target.family, target.spec)
    of_ends = {rule.ours for rule in end_rules(target.family, target.spec)}
    ends = bytes_of((rule for rule in rules if rule.ours in of_ends), decoder, dtype)
    return Stored(ends, bytes_of(rules, decoder, dtype) - ends)


@dataclass(frozen=True)
class _Target:
    """What a target's directory says that it holds."""

    directory: Path
    family: Family
    spec: DecoderSpec
    quantization: Quantization
    adapter: Adapter | None = None

    @classmethod
    def read(cls, directory: Path, lora: str | None) -> "_Target":
        """What its configuration and its files say together, and an adapter's.

        Full fine-tuning of a tied model may leave a head of its own, which transformers keeps.
        """
        family, spec = read_family(directory)
        quantization = read_quantization(directory)
        tied = spec.tie_word_embeddings
        if tied and quantization.layout_of(head(family.prefix), known_names(directory)) is not None:
            spec = replace(spec, tie_word_embeddings=False)  # rounded to be read in its place
        elif tied and _has_own_head(directory, family):
            warnings.warn(
                f"{directory}: config.json ties the head to the embeddings, but its files hold "
                "another head; this one is used, as by transformers (vLLM drops it); set "
                "tie_word_embeddings to false",
                stacklevel=3,
            )
            spec = replace(spec, tie_word_embeddings=False)
        adapter = None if lora is None else Adapter.read(lora)
        target = cls(directory, family, spec, quantization, adapter)
        if adapter is not None:
            names = tensor_names(directory)
            adapter.check(target.rules(names), target.left_out(names))
        return target

    def without_values(self, max_length: int | None) -> Decoder:
        """A decoder whose weights are still to be read."""
        with torch.device("meta"):
            return Decoder(self.spec, max_length)

    def rules(self, names: Container[str]) -> list[TensorRule]:
        """All rules for a file with these tensors."""
        return self.as_stored(decoder_rules(self.family, self.spec), names)

    def adapted(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor of its files, with what the adapter adds."""
        return tensor if self.adapter is None else self.adapter.merged(name, tensor)

    def as_stored(self, rules: Iterable[TensorRule], names: Container[str]) -> list[TensorRule]:
        """The rules for a file with these tensors."""
        with about(self.directory):
            return [self.quantization.as_stored(rule, names) for rule in rules]

    def left_out(self, names: Iterable[str]) -> set[str]:
        """Tensors of a file that text has no use of."""
        return {name for name in names if name.startswith(self.family.ignored)}

    def ignored(self, names: Collection[str]) -> set[str]:
        """Tensors of a file that are not needed but allowed."""
        others = self.left_out(names) | self._empty_biases(names)
        if self.spec.tie_word_embeddings:
            others.add(head(self.family.prefix))
        return others | self.quantization.ignored(names)

    def _empty_biases(self, names: Collection[str]) -> set[str]:
        """Zeros that GPTQ's writers put where products have no bias; other numbers are refused."""
        beside = {name for name in names if f"{name.removesuffix('bias')}qweight" in names}
        if beside:
            beside -= file_names(self.rules(names))
        for name, bias in read_tensors(self.directory, beside).items():
            if bool(bias.any()):
                raise InputError(f"its tensor {name} is a bias, and the model's product has none")
        return beside

    def filled(
        self,
        decoder: Decoder,
        rules: Iterable[TensorRule],
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Decoder:
        """A decoder with the values of the directory's tensors, ready for inference."""
        with about(self.directory):
            ignored = self.ignored(tensors)
            assemble(decoder, rules, tensors, ignored, dtype, device, self.adapted)
        if self.spec.tie_word_embeddings:
            decoder.head.weight = decoder.embed.weight
        decoder = _settled(decoder, rules, dtype, device)
        set_kv_scales(decoder, tensors, self.family.prefix)
        pack(decoder)
        return decoder


def _settled(module: M, rules: Iterable[TensorRule], dtype: torch.dtype, device: torch.device) -> M:
    """A module for inference, in one type but for what has its own."""
    own = {rule.ours: rule.dtype for rule in rules if rule.dtype is not None}
    exact = {name: module.get_parameter(name).data for name in own}
    module = module.to(device=device, dtype=dtype).requires_grad_(False).eval()
    for name, value in exact.items():
        module.get_parameter(name).data = value
    return module


def _has_own_head(directory: Path, family: Family) -> bool:
    """Whether files hold both, and they differ."""
    names = embeddings(family.prefix), head(family.prefix)
    found = read_tensors(directory, {*names})
    if len(found) < 2:
        return False
    embedding, own = (found[name] for name in names)
    return not torch.equal(own.to(embedding.dtype), embedding)

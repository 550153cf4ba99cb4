"""A target's parts -> its directory: the inverse of `peagle.models.loading`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from peagle.errors import InputError
from peagle.models.decoder import Decoder, DecoderLayer
from peagle.models.families import end_rules, layer_rules, read_values
from peagle.models.families.config import Values
from peagle.models.families.gpt_oss import ExpertRule
from peagle.models.formats.fp4 import Fp4
from peagle.models.formats.fp8 import Fp8
from peagle.models.formats.integers import Compressed, Integers
from peagle.models.formats.layout import Layout, PackedRule, Part
from peagle.models.quantization import quantization_of
from peagle.models.weights import INDEX, TensorRule, disassemble, regrouped, save_tensors
from peagle.ops.weight import E4M3, QuantizedWeight, weight_at


def save_target(
    directory: Path,
    values: Values,
    ends: Decoder,
    layers: Iterable[DecoderLayer],
    heads: Sequence[tuple[nn.Module, Sequence[TensorRule]]] = (),
) -> None:
    """Write a target's configuration, and a file of weights for each layer and one for the rest.

    values: of its `config.json`, `quantization_config` included; packed weights are written as they
    are. ends: as of `load_ends`. Each layer is written before the next is taken. heads: what else
    its files hold, each with a file of its own, such as a head that drafts.
    """
    family, spec = read_values(values, str(directory))
    given = values.get("quantization_config")
    layouts = [group.layout for group in quantization_of(given).groups] if given else []

    def parts() -> Iterator[dict[str, Tensor]]:
        for index, layer in enumerate(layers):
            rules = layer_rules(family, spec, index, "0")
            yield _tensors(nn.ModuleList([layer]), rules, layouts)
        for module, of_module in ((ends, end_rules(family, spec)), *heads):
            yield _tensors(module, of_module, layouts)

    _write_shards(directory, parts(), len(spec.layers) + 1 + len(heads))
    text = json.dumps(values, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def _tensors(
    module: nn.Module, rules: Iterable[TensorRule], layouts: Sequence[Layout]
) -> dict[str, Tensor]:
    """A module's weights under the file's names, each in its own format."""
    tensors: dict[str, Tensor] = {}
    for rule in rules:
        ours = weight_at(module, rule.ours)
        if isinstance(ours, Tensor):
            tensors |= disassemble(module, [rule])
            continue
        packed = rule.packed() if isinstance(rule, ExpertRule) else _packed(rule, ours, layouts)
        stored = [tensor.detach().cpu() for tensor in packed_tensors(packed, ours)]
        if isinstance(rule, ExpertRule):
            stored = [rule.unsorted(tensor) for tensor in stored]
        tensors |= zip(packed.theirs, (tensor.contiguous() for tensor in stored), strict=True)
    return tensors


def _packed(rule: TensorRule, ours: QuantizedWeight, layouts: Iterable[Layout]) -> PackedRule:
    """The rule by which a weight of few bits is written."""
    found = next(filter(None, (_holding(layout, ours) for layout in layouts)), None)
    if found is None:
        raise InputError(f"quantization_config names no layout for {ours.format.name} weights")
    return PackedRule.of(rule, found)


def _holding(layout: Layout, weight: QuantizedWeight) -> Layout | None:
    """The layout, or the like of it that holds what a weight has; None: neither."""
    if not isinstance(layout, Integers):
        alike = (weight.format, weight.divided) == (layout.format, layout.divided)
        return layout if alike else None
    alike = (weight.format, weight.block) == (layout.format, layout.block(weight.shape[-1], ()))
    return replace(layout, zeros=weight.zeros is not None) if alike else None


def packed_tensors(rule: PackedRule, ours: QuantizedWeight) -> Sequence[Tensor]:
    """The inverse of the rule's `join`. Raises `InputError` for a layout that is only read."""
    high, columns = ours.block[0], -(-ours.shape[-1] // ours.block[1])
    blocks = [size // high for size in rule.sizes]

    def apart(joined: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        return regrouped(joined.flatten(0, rule.leading - 1), rule.order).split(list(sizes))

    none = [None] * len(blocks)
    zeros = none if ours.zeros is None else apart(ours.zeros[..., :columns], blocks)
    factors = none if ours.factors is None else apart(ours.factors, rule.sizes)
    numbers, scales = apart(ours.packed(), rule.sizes), apart(ours.scales[..., :columns], blocks)
    found = zip(numbers, scales, zeros, factors, strict=True)
    written = [stored(rule.layout, Part(*part), high) for part in found]
    return [tensor for of_end in zip(*written, strict=True) for tensor in of_end]


def stored(layout: Layout, part: Part, high: int) -> Sequence[Tensor]:
    """The tensors of a part in a layout: the inverse of the layout's `read`.

    high: outputs that share a scale in memory. Raises `InputError` for a layout that is only read.
    """
    match layout:
        case Fp8():
            return part.packed.view(E4M3), _scales(layout, part.scales, high)
        case Fp4():
            half = layout.format.block // 2
            packed = part.packed.unflatten(-1, (-1, half)) if layout.by_block else part.packed
            if part.factors is None:
                return packed, part.scales
            return packed, part.scales, part.factors[:1].reshape((1,) if layout.divided else ())
        case Compressed(words=False):
            zeros = () if part.zeros is None else (part.zeros.view(torch.int8),)
            return part.packed.view(torch.int8), part.scales, *zeros
        case Compressed():
            return _in_words(layout, part)
    raise InputError(f"weights are not written in {type(layout).__name__.upper()}'s layout")


def _scales(layout: Fp8, scales: Tensor, high: int) -> Tensor:
    """As a file has them: of those that were repeated the first."""
    if layout.strategy == "block":
        return scales[:: layout.blocks[0] // high]
    shared = layout.strategy == "tensor" and bool((scales == scales[0]).all())
    return scales[:1] if shared else scales


def _in_words(layout: Compressed, part: Part) -> Sequence[Tensor]:
    """Codes in words of 32 bits, zero points along outputs."""
    numbers = layout.coded(part.packed)
    shape = torch.tensor((len(numbers), numbers.shape[1] * 8 // layout.bits))
    written = [numbers.view(torch.int32), part.scales, shape]
    if part.zeros is not None:
        codes = layout.coded(part.zeros).mT.contiguous()
        codes = nn.functional.pad(codes, (0, -codes.shape[1] % (32 // layout.bits)))
        words = layout.format.packed(codes).flatten().view(torch.int32)
        written.append(words.view(len(codes), -1).mT)
    return written


def _write_shards(directory: Path, parts: Iterable[dict[str, Tensor]], count: int) -> None:
    """Write each of `count` parts into a file of its own, before the next is taken, and an index.

    The inverse of `read_tensors`.
    """
    weight_map: dict[str, str] = {}
    size = 0
    for number, tensors in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{count:05}.safetensors"
        save_tensors(directory / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

"""A target's parts -> its directory: the inverse of `peagle.models.loading`."""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor, nn

from peagle.models.decoder import Decoder, DecoderLayer
from peagle.models.families import end_rules, layer_rules, read_values
from peagle.models.families.config import Values
from peagle.models.quantization import Quantization, quantization_of
from peagle.models.weights import INDEX, TensorRule, disassemble, save_tensors
from peagle.ops.weight import weight_at


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
    quantization = quantization_of(given) if given else Quantization()

    def parts() -> Iterator[dict[str, Tensor]]:
        for index, layer in enumerate(layers):
            rules = layer_rules(family, spec, index, "0")
            yield _tensors(nn.ModuleList([layer]), rules, quantization)
        for module, of_module in ((ends, end_rules(family, spec)), *heads):
            yield _tensors(module, of_module, quantization)

    _write_shards(directory, parts(), len(spec.layers) + 1 + len(heads))
    text = json.dumps(values, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")


def _tensors(
    module: nn.Module, rules: Iterable[TensorRule], quantization: Quantization
) -> dict[str, Tensor]:
    """A module's weights under the file's names, each in its own format."""
    written = [quantization.as_written(rule, weight_at(module, rule.ours)) for rule in rules]
    return disassemble(module, written)


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

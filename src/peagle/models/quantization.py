"""In which format a target's files hold its weights: what `quantization_config` means."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from peagle.errors import InputError
from peagle.models.formats.fp8 import Fp8
from peagle.models.formats.layout import Layout, PackedRule, stem
from peagle.models.weights import TensorRule, about, read_json
from peagle.ops.weight import Weight

Values = Mapping[str, Any]
SUPPORTED = (
    "peagle reads fp8, compressed-tensors (float-quantized), modelopt (FP8), fbgemm_fp8 and, for "
    "GPT-OSS, mxfp4; vLLM serves others"
)
BESIDE = "hf_quant_config.json"
"""Where modelopt says it, if not in `config.json`."""


LEFT_OUT = (
    ".input_scale",
    ".activation_scale",
    ".activation_scale_ub",
    ".input_scale_ub",
)
"""Ends of the names of scales for activations, which are kept in 16 bits."""


PRODUCTS = ("qkv.weight", "out.weight", "gate_up.weight", "down.weight", "head.weight")
EXPERTS = (".gate_up", ".down")
"""How our names of weights end that may be in few bits: those of products, and of experts."""


@dataclass(frozen=True)
class Quantization:
    """The layouts that weights of a directory may have; which one has, its tensors say."""

    layouts: tuple[Layout, ...] = ()

    def as_stored(self, rule: TensorRule, names: Container[str]) -> TensorRule:
        """The rule for the same parameter in a file with these tensors: not all are quantized.

        Raises `InputError` where no product reads it: of embeddings, norms and routers.
        """
        if type(rule) is not TensorRule:
            return rule
        layout = next((found for name in rule.theirs if (found := self._of(name, names))), None)
        if layout is None:
            return rule
        if not rule.ours.endswith(PRODUCTS + EXPERTS):
            raise InputError(
                f"{rule.theirs[0]} has scales; peagle reads {layout.label} in products of "
                "attention, MLP, experts and head alone; vLLM serves others"
            )
        return PackedRule.of(rule, layout)

    def _of(self, name: str, names: Container[str]) -> Layout | None:
        """How a file has a weight: in a layout, or, None, in none."""
        found = (layout.stored(stem(name), names) for layout in self.layouts)
        return next((layout for layout in found if layout is not None), None)

    def as_written(self, rule: TensorRule, ours: Weight) -> TensorRule:
        """The rule by which a weight is written that is quantized, or is not."""
        if isinstance(ours, Tensor) or type(rule) is not TensorRule:
            return rule.as_written(ours)
        return PackedRule.of(rule, next(x for x in self.layouts if x.format == ours.format))


def read_quantization(directory: Path) -> Quantization:
    """How a directory's weights are kept, other than in 16 or 32 bits.

    Raises `InputError` for a method, scheme or group size that is not supported.
    """
    values = read_json(directory / "config.json")
    within = _mapping(values.get("text_config") or {})
    given = values.get("quantization_config") or within.get("quantization_config")
    if given:
        return quantization_of(_mapping(given))
    if not (directory / BESIDE).is_file():
        return Quantization()
    beside = {"quant_method": "modelopt", **read_json(directory / BESIDE)}
    with about(directory / BESIDE):
        return quantization_of(beside)


def quantization_of(given: Values) -> Quantization:
    """What the values of a `quantization_config` mean. Raises `InputError` as above."""
    method = _mapping(given).get("quant_method")
    if method == "mxfp4":  # which its family reads
        return Quantization()
    if not isinstance(method, str) or method not in READERS:
        raise InputError(f"quant_method {method} is not supported; {SUPPORTED}")
    return Quantization((READERS[method](given),))


def _fp8(given: Values) -> Fp8:
    """Hugging Face's own, with block-wise scales or one for a weight, and AutoFP8's."""
    numbers = given.get("fmt", "e4m3")
    if numbers != "e4m3":
        raise InputError(f"fp8 weights of fmt {numbers} are not supported; {SUPPORTED}")
    block = given.get("weight_block_size")
    dynamic = given.get("activation_scheme", "dynamic") == "dynamic"
    scales = "weight_scale_inv", "weight_scale"
    if "weight_block_size" not in given:  # which AutoFP8 does not write
        scales = scales[::-1]
    if block is None:
        return Fp8(scales, "tensor", dynamic_activations=dynamic)
    return Fp8(scales, "block", _block(block), dynamic_activations=dynamic)


def _compressed_tensors(given: Values) -> Fp8:
    kind = given.get("format", "float-quantized")
    if kind != "float-quantized":
        raise InputError(f"compressed-tensors of format {kind} are not supported; {SUPPORTED}")
    if given.get("transform_config"):
        raise InputError(
            f"compressed-tensors with a transform_config are not supported; {SUPPORTED}"
        )
    groups = _mapping(given.get("config_groups")).values()
    found = {_of_group(_mapping(group)) for group in groups}
    if len(found) != 1:
        raise InputError(
            f"compressed-tensors with {len(found)} different groups of weights are not supported, "
            f"only one; {SUPPORTED}"
        )
    return found.pop()


def _of_group(group: Values) -> Fp8:
    weights = _mapping(group.get("weights"))
    dynamic = _mapping(group.get("input_activations") or {}).get("dynamic") is True
    bits, kind = weights.get("num_bits"), weights.get("type")
    if (bits, kind) != (8, "float"):
        raise InputError(f"compressed-tensors of {bits}-bit {kind} are not supported; {SUPPORTED}")
    strategy = weights.get("strategy")
    if strategy in ("tensor", "channel"):
        return Fp8(("weight_scale",), str(strategy), dynamic_activations=dynamic)
    if strategy == "block":
        blocks = _block(weights.get("block_structure"))
        return Fp8(("weight_scale",), "block", blocks, dynamic_activations=dynamic)
    raise InputError(f"compressed-tensors of strategy {strategy} are not supported; {SUPPORTED}")


def _modelopt(given: Values) -> Fp8:
    given = {**given, **_mapping(given.get("quantization") or {})}
    algorithm = given.get("quant_algo")
    known = {
        "FP8": Fp8(("weight_scale",), "tensor"),
        "FP8_PER_CHANNEL_PER_TOKEN": Fp8(("weight_scale",), "channel", dynamic_activations=True),
        "FP8_PB_WO": Fp8(("weight_scale",), "block", (128, 128)),
    }
    if not isinstance(algorithm, str) or algorithm not in known:
        raise InputError(f"modelopt's quant_algo {algorithm} is not supported; {SUPPORTED}")
    return known[algorithm]


READERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fbgemm_fp8": lambda _: Fp8(("weight_scale",), "channel"),
}


def _block(given: Any) -> tuple[int, int]:
    match given:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise InputError(f"weight blocks of {given} are not supported; give [outputs, inputs]")


def _mapping(given: Any) -> Values:
    if not isinstance(given, Mapping):
        raise InputError(f"quantization_config has {given!r} where settings belong")
    return given

"""In which format a target's files hold its weights: what `quantization_config` means."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.errors import InputError
from peagle.models.fp8 import Fp8
from peagle.models.weights import about, read_json

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


def read_quantization(directory: Path) -> Fp8 | None:
    """The format of a directory's weights; None: 16 or 32 bits, or MXFP4, which its family reads.

    Raises `InputError` for a method, scheme or group size that is not supported.
    """
    values = read_json(directory / "config.json")
    within = _mapping(values.get("text_config") or {})
    given = values.get("quantization_config") or within.get("quantization_config")
    if given:
        return quantization_of(_mapping(given))
    if not (directory / BESIDE).is_file():
        return None
    beside = {"quant_method": "modelopt", **read_json(directory / BESIDE)}
    with about(directory / BESIDE):
        return quantization_of(beside)


def quantization_of(given: Values) -> Fp8 | None:
    """What the values of a `quantization_config` mean. Raises `InputError` as above."""
    method = _mapping(given).get("quant_method")
    if method == "mxfp4":
        return None
    if not isinstance(method, str) or method not in READERS:
        raise InputError(f"quant_method {method} is not supported; {SUPPORTED}")
    return READERS[method](given)


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
    return Fp8(scales, "block", _block(block), dynamic)


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
        return Fp8(("weight_scale",), "block", _block(weights.get("block_structure")), dynamic)
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

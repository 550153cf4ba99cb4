"""In which formats a directory's files hold its weights: what `quantization_config` means.

Which weight is in which, its tensors say: of the configuration only bits, groups and schemes are
needed, and what must be refused.
"""

import re
import warnings
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.errors import InputError, about
from peagle.models.formats import fp4
from peagle.models.formats.fp8 import Fp8
from peagle.models.formats.integers import Awq, Compressed, Gptq
from peagle.models.formats.layout import Layout, PackedRule, stem
from peagle.models.weights import TensorRule, read_json
from peagle.ops.weight import INT4, INT8, Format

Values = Mapping[str, Any]
SUPPORTED = (
    "peagle reads fp8, fbgemm_fp8, compressed-tensors (FP8, NVFP4, MXFP4, int4, int8), modelopt "
    "(FP8, NVFP4), awq, gptq and, for GPT-OSS, mxfp4; vLLM serves others"
)
CONFIGS = ("quantization_config", "compression_config")
"""Where `config.json` says it; under the second name in compressed-tensors' first files."""
BESIDE = "hf_quant_config.json"
"""Where modelopt says it, too or alone."""
LEFT_OUT = re.compile(r"\.(input_global_scale|(input|activation)_scale(_ub)?)$")
"""Names of scales for activations, which are kept in 16 bits."""
STOPS = {
    ".pre_quant_scale": "inputs of products are scaled (pre_quant_scale), which is not supported",
    ".svdquant_lora_a": "low-rank parts beside the weights (svdquant_lora) are not supported",
}
"""Ends of the names of tensors without which weights would be others, and what is said of them."""
IN_FEW_BITS = re.compile(r"(qkvz?|out|gate_up|down|head|fc)\.weight$|\.(gate_up|down)$")
"""Our names of weights that may be in few bits: those of products, and of experts."""


@dataclass(frozen=True)
class LayoutGroup:
    """A layout, and the modules for which it is meant where others would fit as well."""

    layout: Layout
    targets: tuple[str, ...] = ()
    """Names of modules, their ends, or regular expressions for them after "re:"; else classes."""

    def rank(self, module: str) -> int:
        """0 where a module is meant by name, 1 where every product is, else 2."""
        named = any(
            re.match(target[3:], module) if target.startswith("re:") else module.endswith(target)
            for target in self.targets
        )
        return 0 if named else 1 if "Linear" in self.targets else 2


@dataclass(frozen=True)
class Quantization:
    """The layouts that weights of a directory may have."""

    groups: tuple[LayoutGroup, ...] = ()

    def as_stored(self, rule: TensorRule, names: Container[str]) -> TensorRule:
        """The rule for the same parameter in a file with these tensors: not all are quantized.

        Raises `InputError` where no product reads it: of embeddings, norms and routers.
        """
        if type(rule) is not TensorRule:
            return rule.as_stored(names)
        for each in (rule, *rule.layouts):
            layout = self._of_parts(each.theirs, names)
            if layout is None:
                continue
            if not IN_FEW_BITS.search(rule.ours):
                raise InputError(
                    f"{rule.theirs[0]} has scales; peagle reads {layout.label} in products of "
                    "attention, MLP, experts and head alone; vLLM serves others"
                )
            return PackedRule.of(each, layout)
        return rule.as_stored(names)

    def _of_parts(self, parts: Iterable[str], names: Container[str]) -> Layout | None:
        """The one layout of all parts of a product; None: not in few bits."""
        found = {name: self.layout_of(name, names) for name in parts}
        layouts = {layout: name for name, layout in reversed(found.items()) if layout is not None}
        if not layouts:
            return None
        (layout, one), *others = layouts.items()
        # a part without scales beside its numbers may lack them: that is told of its tensors
        unpacked = [name for name, own in found.items() if own is None and name in names]
        plain = unpacked if layout.ends[0] != "weight" else []
        other = next(iter([*(name for _, name in others), *plain]), None)
        if other is not None:
            raise InputError(
                f"{one} is {layout.label} and {other} is not, or not alike; peagle multiplies them "
                "together, which needs one format (for q, k and v, and for gate and up)"
            )
        return layout

    def layout_of(self, name: str, names: Container[str]) -> Layout | None:
        """How a file with these tensors has a weight; None: not in few bits."""
        begin = stem(name)
        groups = sorted(self.groups, key=lambda group: group.rank(begin.removesuffix(".")))
        found = (group.layout.stored(begin, names) for group in groups)
        return next((layout for layout in found if layout is not None), None)

    def ignored(self, names: Iterable[str]) -> set[str]:
        """Tensors of a file that are not needed. Raises `InputError` for any that would be."""
        if not self.groups:
            return set()
        for name in names:
            for end, words in STOPS.items():
                if name.endswith(end):
                    raise InputError(f"{name}: {words}; vLLM serves such")
        return {name for name in names if LEFT_OUT.search(name)}


def read_quantization(directory: Path) -> Quantization:
    """How a directory's weights are kept, other than in 16 or 32 bits.

    Raises `InputError` for a method, scheme or group size that is not supported.
    """
    values = read_json(directory / "config.json")
    within = _mapping(values.get("text_config") or {})
    named = (where.get(name) for where in (values, within) for name in CONFIGS)
    given = next(filter(None, named), None)
    found = quantization_of(_mapping(given)) if given else Quantization()
    if not (directory / BESIDE).is_file():
        return found
    try:
        with about(directory / BESIDE):
            other = quantization_of({"quant_method": "modelopt", **read_json(directory / BESIDE)})
    except InputError:
        if not given:
            raise
        other = Quantization()
    if given and set(other.groups) != set(found.groups):
        warnings.warn(
            f"{directory}: config.json and {BESIDE} say different things of its weights; its "
            "tensors say which are in which format",
            stacklevel=2,
        )
    return Quantization(tuple(dict.fromkeys((*found.groups, *other.groups))))


def quantization_of(given: Values) -> Quantization:
    """What the values of a `quantization_config` mean. Raises `InputError` as above."""
    method = _mapping(given).get("quant_method")
    if method is None and "quant_algo" in given:
        method = "modelopt"
    if method == "mxfp4":  # which its family reads
        return Quantization()
    if not isinstance(method, str) or method not in READERS:
        raise InputError(f"quant_method {method} is not supported; {SUPPORTED}")
    return Quantization(tuple(READERS[method](given)))


def _fp8(given: Values) -> list[LayoutGroup]:
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
        return [LayoutGroup(Fp8(scales, "tensor", dynamic_activations=dynamic))]
    return [LayoutGroup(Fp8(scales, "block", _block(block), dynamic_activations=dynamic))]


def _compressed_tensors(given: Values) -> list[LayoutGroup]:
    if given.get("transform_config"):
        raise InputError(
            "its weights are rotated (transform_config); peagle applies no transforms; vLLM does"
        )
    if _mapping(given.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise InputError("sparse weights (sparsity_config) are not supported")
    groups = []
    for group in _mapping(given.get("config_groups")).values():
        if _mapping(group).get("weights"):
            targets = tuple(map(str, group.get("targets") or ()))
            try:
                _ = [re.compile(target[3:]) for target in targets if target.startswith("re:")]
            except re.error as error:
                raise InputError(f"quantization_config's targets {targets}: {error}") from None
            groups.append(LayoutGroup(_of_group({"format": given.get("format"), **group}), targets))
    return [*groups, LayoutGroup(fp4.COMPRESSED), LayoutGroup(Fp8(("weight_scale",), "channel"))]


def _of_group(group: Values) -> Layout:
    weights = _mapping(group.get("weights"))
    dynamic = _mapping(group.get("input_activations") or {}).get("dynamic") is True
    bits, kind, strategy = (weights.get(key) for key in ("num_bits", "type", "strategy"))
    size = weights.get("group_size")
    if (bits, kind) == (8, "float") and strategy in ("tensor", "channel"):
        return Fp8(("weight_scale",), str(strategy), dynamic_activations=dynamic)
    if (bits, kind) == (8, "float") and strategy == "block":
        blocks = _block(weights.get("block_structure"))
        return Fp8(("weight_scale",), "block", blocks, dynamic_activations=dynamic)
    if (bits, kind) == (4, "float") and size in (16, 32):
        return fp4.COMPRESSED if size == 16 else fp4.COMPRESSED_MXFP4
    if kind != "int" or strategy in ("block", "tensor_group"):
        raise InputError(
            f"compressed-tensors of {bits}-bit {kind} ({strategy} {size}) are not supported; "
            f"{SUPPORTED}"
        )
    if weights.get("actorder") in ("group", "dynamic"):
        raise InputError(
            "inputs are in the order of their groups (actorder group); re-quantise with actorder "
            '"weight"; vLLM 0.33 refuses it, too'
        )
    words = group.get("format") not in ("int-quantized", "naive-quantized")
    group_size = None if strategy in ("channel", "tensor") else _group_size(size)
    return Compressed(_integers(bits), group_size, words=words)


ALGORITHMS: dict[str, Layout] = {
    "FP8": Fp8(),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8(("weight_scale",), "channel", dynamic_activations=True),
    **dict.fromkeys(("FP8_PB_WO", "FP8_BLOCK_SCALES"), Fp8(strategy="block", blocks=(128, 128))),
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), fp4.MODELOPT),
}
"""modelopt's, by `quant_algo`."""


def _modelopt(given: Values) -> list[LayoutGroup]:
    given = {**given, **_mapping(given.get("quantization") or {})}
    if given.get("quant_algo") is None and given.get("kv_cache_quant_algo"):
        return []  # keys and values alone are quantised
    algorithms = {str(given.get("quant_algo")).upper()}
    if algorithms == {"MIXED_PRECISION"}:
        layers = _mapping(given.get("quantized_layers") or {}).values()
        algorithms = {str(_mapping(layer).get("quant_algo")).upper() for layer in layers}
    refused = sorted(algorithms - ALGORITHMS.keys())
    if refused:
        why = STOPS[".pre_quant_scale"] if "AWQ" in refused[0] else SUPPORTED
        raise InputError(f"modelopt's quant_algo {refused[0]} is not supported; {why}")
    # NVFP4 first: what tells of FP8, it has, too
    named = dict.fromkeys((fp4.MODELOPT, *(ALGORITHMS[name] for name in sorted(algorithms))))
    return [LayoutGroup(layout) for layout in (named if len(named) > 1 else (*named, Fp8()))]


def _awq(given: Values) -> list[LayoutGroup]:
    version = str(given.get("version", "gemm")).lower()
    if version != "gemm":
        raise InputError(f"AWQ of version {version} is not supported, only gemm")
    older = {"bits": given.get("w_bit"), "group_size": given.get("q_group_size")}
    bits, size = ({**older, **given}[key] for key in older)
    if bits != 4:
        raise InputError(f"AWQ of {bits} bits is not supported, only of 4")
    return [LayoutGroup(Awq(INT4, _group_size(size)))]


def _gptq(given: Values) -> list[LayoutGroup]:
    newer = given.get("checkpoint_format") == "gptq_v2"
    symmetric = bool(given.get("sym", True))
    if not symmetric and not newer:
        raise InputError(
            "asymmetric GPTQ of version 1 cannot store every zero point; convert it to gptq_v2"
        )
    # a rule that begins with "-:" leaves modules as they are, which their tensors say, too
    rules = _mapping(given.get("dynamic") or {})
    if own := [name for name, rule in rules.items() if rule and not name.startswith("-:")]:
        raise InputError(
            f"GPTQ with rules for single modules (dynamic) is not supported, such as {own[0]}; "
            "vLLM serves it"
        )
    form, size = _integers(given.get("bits")), _group_size(given.get("group_size"))
    return [LayoutGroup(Gptq(form, size, not symmetric, less=0 if newer else 1))]


def _auto_round(given: Values) -> list[LayoutGroup]:
    packing = given.get("packing_format")
    if packing != "auto_round:auto_gptq":
        raise InputError(f"auto-round of packing_format {packing} is not supported; {SUPPORTED}")
    return _gptq(given)


READERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mixed"), _modelopt),
    "fbgemm_fp8": lambda _: [LayoutGroup(Fp8(("weight_scale",), "channel"))],
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
}


def _integers(bits: Any) -> Format:
    """Integers of so many bits."""
    if bits not in (4, 8):
        raise InputError(f"{bits}-bit weights are not supported, only of 4 and 8 bits; vLLM serves")
    return INT4 if bits == 4 else INT8


def _group_size(given: Any) -> int | None:
    """Inputs of a group; None, in files -1: all of an output."""
    if given in (None, -1):
        return None
    if not isinstance(given, int) or given < 1:
        raise InputError(f"weights in groups of {given!r} are not supported")
    return given


def _block(given: Any) -> tuple[int, int]:
    match given:
        case [int(outputs), int(inputs)] if outputs > 0 and inputs > 0:
            return outputs, inputs
    raise InputError(f"weight blocks of {given} are not supported; give [outputs, inputs]")


def _mapping(given: Any) -> Values:
    if not isinstance(given, Mapping):
        raise InputError(f"quantization_config has {given!r} where settings belong")
    return given

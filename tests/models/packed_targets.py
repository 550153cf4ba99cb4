"""Tiny targets in the packed formats that people download, beside their dequantised twins."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.models.formats import fp4
from peagle.models.formats.fp8 import Fp8
from peagle.models.formats.integers import AWQ_ORDER, Awq, Compressed, Gptq, Integers
from peagle.models.formats.layout import Layout, Part
from peagle.ops.weight import FP8, INT4, INT8, QuantizedWeight
from peagle.ops.weight.fp4 import POSITIVE
from saving import stored

Settings = dict[str, Any]
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Form:
    """What a checkpoint's `config.json` says, and how its weights are kept."""

    settings: Settings
    layout: Callable[[str], Layout | None]
    """Of the weight with a name; None: plain."""


def of_group(targets: list[str], form: str, **weights: Any) -> Settings:
    usual = {"symmetric": True, "actorder": None, "block_structure": None, "dynamic": False}
    return {
        "targets": targets,
        "weights": {**usual, **weights},
        "input_activations": None,
        "output_activations": None,
        "format": form,
    }


def compressed(form: str, *groups: Settings, ignore: tuple[str, ...] = ("lm_head",)) -> Settings:
    """As compressed-tensors 0.17 writes it."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {f"group_{i}": group for i, group in enumerate(groups)},
        "ignore": [*ignore],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
    }


def linear(layout: Layout) -> Callable[[str], Layout | None]:
    """All products of layers."""
    return lambda name: None if name.startswith("lm_head") else layout


def every(layout: Layout) -> Callable[[str], Layout | None]:
    """The head, too."""
    return lambda name: layout


def by_module(name: str) -> Layout | None:
    """As in NVIDIA's mixed files: attention in FP8, MLPs, experts and the head in NVFP4."""
    return Fp8() if "self_attn" in name else fp4.MODELOPT


def by_layer(name: str) -> Layout | None:
    """As in a mixed file of compressed-tensors: the last MLPs and attention in FP8."""
    channels = Fp8(("weight_scale",), "channel")
    first = "mlp" in name and ("layers.0." in name or "layers.1." in name)
    return fp4.COMPRESSED if first else channels


def by_attention(name: str) -> Layout | None:
    """As in a mixed file of compressed-tensors: attention in FP8, all other products in NVFP4."""
    of_attention = Fp8(("weight_scale",), "channel")
    return of_attention if "self_attn" in name else linear(fp4.COMPRESSED)(name)


GROUPS_OF_32 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
NVFP4 = "nvfp4-pack-quantized"
FORMS = {
    "int4": Form(
        compressed("pack-quantized", of_group(["Linear"], "pack-quantized", **GROUPS_OF_32)),
        linear(Compressed(INT4, 32)),
    ),
    "int4, asymmetric": Form(
        compressed(
            "pack-quantized",
            of_group(["Linear"], "pack-quantized", **{**GROUPS_OF_32, "symmetric": False}),
        ),
        linear(Compressed(INT4, 32, True)),
    ),
    "int8": Form(
        compressed(
            "int-quantized",
            of_group(["Linear"], "int-quantized", num_bits=8, type="int", strategy="channel"),
        ),
        linear(Compressed(INT8, words=False)),
    ),
    "nvfp4 of compressed-tensors": Form(
        compressed(NVFP4, of_group(["Linear"], NVFP4, **FLOAT4)), linear(fp4.COMPRESSED)
    ),
    "mxfp4 of compressed-tensors": Form(
        compressed(
            "mxfp4-pack-quantized",
            of_group(["Linear"], "mxfp4-pack-quantized", **{**FLOAT4, "group_size": 32}),
        ),
        linear(fp4.COMPRESSED_MXFP4),
    ),
    "nvfp4 of modelopt, the head too": Form(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["router*"]},
        every(fp4.MODELOPT),
    ),
    "mixed by module": Form(
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
            },
        },
        by_module,
    ),
    "mixed by layer": Form(
        compressed(
            "mixed-precision",
            of_group([r"re:.*layers\.[01]\.mlp.*"], NVFP4, **FLOAT4),
            of_group(["Linear"], "naive-quantized", **CHANNELS),
            ignore=(),
        ),
        by_layer,
    ),
    "mixed, the class last": Form(
        compressed(
            "mixed-precision",
            of_group([r"re:.*self_attn.*"], "naive-quantized", **CHANNELS),
            of_group(["Linear"], NVFP4, **FLOAT4),
        ),
        by_attention,
    ),
    "awq": Form(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        linear(Awq(INT4, 32)),
    ),
    "gptq": Form(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        linear(Gptq(INT4, 32)),
    ),
    "gptq, version 2": Form(
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": False,
            "checkpoint_format": "gptq_v2",
        },
        linear(Gptq(INT4, 32, True, less=0)),
    ),
}


def rounded(weight: Tensor, layout: Layout) -> QuantizedWeight:
    """A weight [outputs, depth] in a layout's format."""
    outputs, depth = weight.shape
    form, block = layout.format, layout.block(depth, (outputs,))
    groups = weight.unflatten(1, (-1, min(block[1], depth)))
    largest = groups.abs().amax(2)
    zeros = factors = None
    if isinstance(layout, Integers):
        most = 7 if layout.bits == 4 else 127
        scales = (largest / most * 1.5).half()
        codes = (groups / scales.float()[:, :, None]).round()
        if layout.zeros:
            zeros = torch.randint(6, 11, scales.shape, dtype=torch.uint8)
            codes = codes + zeros[:, :, None] - 8
        codes = codes.clamp(-most - 1, most).flatten(1).to(torch.int8)
        codes = (codes + 8 if layout.bits == 4 else codes).view(torch.uint8)
    elif form == FP8:
        scales = largest.amax().expand(outputs, 1) if layout.ends else largest
        scales = (largest if layout.strategy == "channel" else scales) / 448
        codes = (weight / scales).to(E4M3).view(torch.uint8)
    else:
        exact = largest / 6
        if form.name == "mxfp4":
            exponents = exact.log2().ceil()
            scales, wide = (exponents + 127).to(torch.uint8), exponents.exp2()
        else:
            shared = largest.max() / 2688
            factors = (1 / shared if layout.divided else shared).expand(outputs)
            scales = (exact / shared).clamp(2**-9, 448).to(E4M3)
            wide = scales.float() * shared
        steps = groups / wide[:, :, None]
        nearest = (steps.abs()[..., None] - torch.tensor(POSITIVE)).abs().argmin(-1)
        codes = (nearest + 8 * (steps < 0)).flatten(1).to(torch.uint8)
    packed = form.packed(codes)
    return QuantizedWeight(form, packed, scales, block, zeros, factors, layout.divided)


def written(weight: QuantizedWeight, layout: Layout) -> list[Tensor]:
    """A weight's tensors as a file has them."""
    columns = -(-weight.shape[1] // weight.block[1])
    zeros = None if weight.zeros is None else weight.zeros[:, :columns]
    part = Part(weight.packed(), weight.scales[:, :columns], zeros, weight.factors)
    if isinstance(layout, Awq | Gptq):
        return transposed(part, layout)
    return [tensor.contiguous() for tensor in stored(layout, part, weight.block[0])]


def transposed(part: Part, layout: Awq | Gptq) -> list[Tensor]:
    """As AutoAWQ and GPTQ have it: 32 bits for eight outputs, or for eight inputs."""
    codes = layout.format.spread(part.packed).T.int()
    zeros = torch.full(part.scales.T.shape, 8) if part.zeros is None else part.zeros.T
    places = AWQ_ORDER if isinstance(layout, Awq) else range(8)
    less = 0 if isinstance(layout, Awq) else layout.less

    def outputs_together(given: Tensor) -> Tensor:
        words = torch.zeros(len(given), given.shape[1] // 8, dtype=torch.int32)
        for output, place in enumerate(places):
            words |= given[:, output::8] << 4 * place
        return words

    if isinstance(layout, Awq):
        return [outputs_together(codes), part.scales.T.contiguous(), outputs_together(zeros.int())]
    words = torch.zeros(len(codes) // 8, codes.shape[1], dtype=torch.int32)
    for place in range(8):
        words |= codes[place::8] << 4 * place
    return [words, part.scales.T.contiguous(), outputs_together(zeros.int() - less)]


KEPT = ("embed_tokens", "norm", "mlp.gate.weight", "router", "bias", "scale")


def pack_target(directory: Path, form: Form) -> Path:
    """Put a directory into a format, and its dequantised twin beside it; returns the twin."""
    tensors = apart(load_file(directory / "model.safetensors"))
    twin, packed = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        layout = form.layout(name)
        if weight.ndim != 2 or any(part in name for part in KEPT) or layout is None:
            continue
        own = rounded(weight, layout)
        del packed[name]
        begin = name.removesuffix("weight")
        for end, tensor in zip(layout.ends, written(own, layout), strict=True):
            packed[begin + end] = tensor
        packed[f"{begin}input_scale"] = torch.ones(())
        twin[name] = own.dense()
    values = json.loads((directory / "config.json").read_text())
    beside = directory.parent / "twin"
    beside.mkdir()
    (beside / "config.json").write_text(json.dumps(values))
    save_file(twin, beside / "model.safetensors", {"format": "pt"})
    save_file(packed, directory / "model.safetensors", {"format": "pt"})
    values["quantization_config"] = form.settings
    (directory / "config.json").write_text(json.dumps(values))
    return beside


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as packed files have them."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 3 or "experts" not in name:
            found[name] = tensor
            continue
        begin, part = name.rsplit(".", 1)
        parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
        for index, expert in enumerate(tensor):
            for of_part, value in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{begin}.{index}.{of_part}.weight"] = value.contiguous()
    return found

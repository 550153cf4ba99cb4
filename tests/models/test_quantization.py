"""Targets in FP8, in every layout in which they are published, beside their dequantised twins."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_families import change_config
from torch.utils._python_dispatch import TorchDispatchMode

from peagle.config import EngineConfig, SamplingParams
from peagle.engine.engine import Engine
from peagle.engine_client import source
from peagle.engine_client.source import EngineSource
from peagle.errors import InputError
from peagle.models import loading
from peagle.models.decoder import Decoder
from peagle.models.families import decoder_rules, read_values
from peagle.models.loading import check_decoder, load_decoder, load_layers, stored_bytes
from peagle.ops.weight import QuantizedWeight, keep_activations, weights_of

E4M3 = torch.float8_e4m3fn
TOKENS = list(range(3, 60))
Settings = dict[str, Any]


def of_group(
    strategy: str, activations: Any = MappingProxyType({"dynamic": True}), **more: Any
) -> Settings:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **more}
    given = None if activations is None else dict(activations)
    return {"targets": ["Linear"], "weights": weights, "input_activations": given}


def compressed(strategy: str, **more: Any) -> Settings:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": of_group(strategy, **more)},
        "ignore": ["lm_head"],
    }


PUBLISHED: dict[str, tuple[Settings, str, str]] = {
    "fp8 in blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]},
        "weight_scale_inv",
        "block",
    ),
    "fp8 whole": ({"quant_method": "fp8", "weight_block_size": None}, "weight_scale_inv", "scalar"),
    "AutoFP8": ({"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale", "scalar"),
    "AutoFP8, dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "kv_cache_scheme": "static"},
        "weight_scale",
        "one",
    ),
    "AutoFP8, channel": ({"quant_method": "fp8"}, "weight_scale", "channel"),
    "AutoFP8, flat": (
        {"quant_method": "fp8", "ignored_layers": ["lm_head"]},
        "weight_scale",
        "flat",
    ),
    "fp8 whole, named without inv": (
        {"quant_method": "fp8", "weight_block_size": None},
        "weight_scale",
        "scalar",
    ),
    "compressed, tensor": (compressed("tensor"), "weight_scale", "one"),
    "compressed, channel": (compressed("channel"), "weight_scale", "channel"),
    "compressed, block": (
        compressed("block", block_structure=[32, 32]),
        "weight_scale",
        "block",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, "weight_scale", "scalar"),
    "modelopt, channel": (
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "weight_scale",
        "flat",
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "weight_scale",
        "channel",
    ),
}
"""The settings, what scales are called, and what shares one."""
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight", "router", "bias")


def scales_for(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Scales by which a weight's numbers fit into E4M3, in the shape of a layout."""
    if kind == "block":
        rows, columns = (-(-size // 32) for size in weight.shape)
        return torch.rand(rows, columns) * 2e-3 + 1e-3
    if kind in ("channel", "flat"):
        scales = torch.rand(len(weight), 1) * 2e-3 + 1e-3
        return scales if kind == "channel" else scales[:, 0]
    return (torch.rand(()) * 2e-3 + 1e-3).reshape(() if kind == "scalar" else (1,))


def expanded(scales: torch.Tensor, kind: str, shape: torch.Size) -> torch.Tensor:
    """A scale for every number."""
    if kind != "block":
        return scales.reshape(-1, 1).expand(shape)
    wide = scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    return wide[: shape[0], : shape[1]]


def quantize(directory: Path, layout: str, scale_dtype: torch.dtype = torch.float32) -> Path:
    """Put a directory into a layout, and its dequantised twin beside it; returns the twin."""
    settings, suffix, kind = PUBLISHED[layout]
    tensors = load_file(directory / "model.safetensors")
    twin, packed = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if weight.ndim != 2 or any(part in name for part in KEPT):
            continue
        scales = scales_for(weight, kind).to(scale_dtype)
        wide = expanded(scales.float(), kind, weight.shape)
        packed[name] = (weight / wide).clamp(-448, 448).to(E4M3)
        packed[f"{name.removesuffix('weight')}{suffix}"] = scales
        packed[f"{name.removesuffix('weight')}input_scale"] = torch.ones(())
        twin[name] = packed[name].float() * wide
    beside = directory.parent / "twin"
    beside.mkdir()
    (beside / "config.json").write_text((directory / "config.json").read_text())
    save_file(twin, beside / "model.safetensors", {"format": "pt"})
    save_file(packed, directory / "model.safetensors", {"format": "pt"})
    change_config(directory, lambda config: config.update(quantization_config=settings))
    return beside


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save_target(tmp_path / "target")


def logits(directory: Path) -> torch.Tensor:
    return tiny.run_target(tiny.load_target(directory), TOKENS)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("layout", PUBLISHED)
@pytest.mark.parametrize(
    "family", ["qwen3", "qwen3_moe", "llama", "gemma4", "gemma4_moe", "phi3", "granite", "qwen2"]
)
def test_every_layout_gives_what_its_dequantised_twin_gives(
    tmp_path: Path, family: str, layout: str
):
    directory = tiny.save_target(tmp_path / "target", family)
    twin = quantize(directory, layout)
    decoder = tiny.load_target(directory)
    packed = [part for part in decoder.modules() if isinstance(part, QuantizedWeight)]
    assert len(packed) == 4 * len(decoder.layers)
    check_decoder(directory)
    found = tiny.run_target(decoder, TOKENS)[0]
    torch.testing.assert_close(found, logits(twin), atol=1e-4, rtol=1e-4)


DYNAMIC = {
    "fp8 in blocks",
    "fp8 whole",
    "fp8 whole, named without inv",
    "AutoFP8, dynamic",
    "AutoFP8, channel",
    "AutoFP8, flat",
    "compressed, tensor",
    "compressed, channel",
    "compressed, block",
    "modelopt, channel",
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_whether_activations_may_be_rounded_too_is_the_files_word(directory: Path, layout: str):
    """And one setting keeps them as they are, whatever the files say."""
    quantize(directory, layout)
    assert activations(load_decoder(directory, torch.float32, tiny.CPU)) == {layout in DYNAMIC}
    kept = load_decoder(directory, torch.float32, tiny.CPU)
    keep_activations(kept)
    assert activations(kept) == {False}


@pytest.mark.parametrize(
    ("layout", "change"),
    [
        ("fp8 in blocks", {"activation_scheme": "static"}),
        ("compressed, channel", {"config_groups": {"a": of_group("channel", activations=None)}}),
        ("compressed, tensor", {"config_groups": {"a": of_group("tensor", activations={})}}),
    ],
)
def test_scales_of_activations_that_are_not_found_as_they_come(
    directory: Path, layout: str, change: Settings
):
    quantize(directory, layout)
    change_config(directory, lambda config: config["quantization_config"].update(change))
    assert activations(load_decoder(directory, torch.float32, tiny.CPU)) == {False}


@pytest.mark.parametrize("told", [True, False])
def test_an_engine_tells_how_activations_are_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch, told: bool
):
    quantize(directory, "fp8 in blocks")
    loaded: list[Decoder] = []

    def load(*given: Any) -> Decoder:
        loaded.append(load_decoder(*given))
        return loaded[0]

    monkeypatch.setattr(source, "load_decoder", load)
    monkeypatch.setattr(source, "widen_on_cpu", lambda *_: None)
    config = EngineConfig(quantize_activations=told, device="cpu", kv_cache_memory=1 << 20)
    tokenizer = SimpleNamespace(eos_token_id=1)
    EngineSource(target=str(directory), speculation=None, config=config).load(tokenizer)
    assert activations(loaded[0]) == {told}


def activations(decoder: Decoder) -> set[bool]:
    return {w.dynamic_activations for w in weights_of(decoder) if isinstance(w, QuantizedWeight)}


def test_qwen3s_sizes_whose_parts_end_within_a_block(tmp_path: Path):
    """Keys and values of 16 outputs each, in blocks of 32: a scale for each output instead."""
    directory = tiny.save_target(tmp_path / "target", num_key_value_heads=1, head_dim=16)
    twin = quantize(directory, "fp8 in blocks")
    qkv = tiny.load_target(directory).layers[0].attention.qkv.weight
    assert isinstance(qkv, QuantizedWeight)
    assert qkv.block == (1, 32)
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_scales_in_bfloat16(directory: Path):
    twin = quantize(directory, "fp8 in blocks", torch.bfloat16)
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_modelopts_own_file(directory: Path):
    """Older exports say nothing in config.json."""
    twin = quantize(directory, "modelopt")
    change_config(directory, lambda config: config.pop("quantization_config"))
    described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (directory / "hf_quant_config.json").write_text(json.dumps(described))
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)
    described["quantization"]["quant_algo"] = "W4A8_MXFP4_FP8"
    (directory / "hf_quant_config.json").write_text(json.dumps(described))
    file = directory / "hf_quant_config.json"
    said = rf"{file}: modelopt's quant_algo W4A8_MXFP4_FP8 is not supported; peagle reads"
    with pytest.raises(InputError, match=said):
        tiny.load_target(directory)


def test_settings_under_their_first_name(directory: Path):
    """As compressed-tensors wrote them in its first months."""
    twin = quantize(directory, "compressed, channel")
    change_config(directory, lambda c: c.update(compression_config=c.pop("quantization_config")))
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_settings_beside_a_language_models_own(tmp_path: Path):
    """Some files of models with towers have them in `text_config`."""
    text = tiny.save_target(tmp_path / "text", "gemma4")
    directory = tiny.save_whole_gemma4(tmp_path / "whole", text)
    twin = quantize(text, "compressed, channel")
    packed = load_file(text / "model.safetensors")
    inner = {f"model.language_{name}": tensor for name, tensor in packed.items()}
    save_file(inner, directory / "model.safetensors", {"format": "pt"})
    settings = PUBLISHED["compressed, channel"][0]
    change_config(
        directory, lambda config: config["text_config"].update(quantization_config=settings)
    )
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_ministral_3_as_it_is_published(tmp_path: Path):
    """In FP8 with one scale a weight, within its tower."""
    text = tiny.save_target(tmp_path / "text", "ministral3")
    directory = tiny.save_whole_mistral3(tmp_path / "whole", text, tied=False)
    twin = quantize(text, "fp8 whole")
    packed = load_file(text / "model.safetensors")
    inner = {f"language_model.{name}": tensor for name, tensor in packed.items()}
    save_file(inner, directory / "model.safetensors", {"format": "pt"})
    settings = PUBLISHED["fp8 whole"][0]
    change_config(directory, lambda config: config.update(quantization_config=settings))
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_layers_one_by_one(directory: Path):
    quantize(directory, "fp8 in blocks")
    decoder = tiny.load_target(directory)
    layers = [*load_layers(directory, torch.float32, tiny.CPU)]
    for one, other in zip(layers, decoder.layers, strict=True):
        assert torch.equal(one.mlp.down.weight.dense(), other.mlp.down.weight.dense())


def test_a_target_in_fp8_writes_the_same_with_and_without_drafts(directory: Path, tmp_path: Path):
    quantize(directory, "fp8 in blocks")
    decoder = tiny.load_target(directory)
    drafter = tiny.random_drafter_for(decoder, tmp_path, tiny.drafter_config(parallel=True))
    how, prompts = SamplingParams(max_tokens=20), [TOKENS[:9], TOKENS[20:50]]
    config = tiny.engine_config()
    plain = tiny.run(Engine(decoder, None, 0, config), prompts, how)
    drafted = tiny.run(Engine(decoder, drafter, 5, config), prompts, how)
    assert tiny.outputs(plain) == tiny.outputs(drafted)


def test_the_memory_asked_for_is_that_of_packed_weights(
    directory: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    monkeypatch.setattr(loading, "require_memory", lambda needed, *_: asked.append(needed))
    quantize(directory, "fp8 in blocks")
    decoder = tiny.load_target(directory, torch.bfloat16)
    assert asked == [sum(weight.nbytes for weight in weights_of(decoder))]


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that is made."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.nbytes = max(self.nbytes, result.nbytes)
        return result


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss"])
def test_a_cpu_widens_one_weight_at_a_time_and_one_expert_of_it(tmp_path: Path, family: str):
    directory = tiny.save_target(tmp_path / "target", family, num_hidden_layers=2, layer_types=None)
    if family == "gpt_oss":
        tiny.pack_experts(directory)
    else:
        quantize(directory, "fp8 in blocks")
    decoder = tiny.load_target(directory)
    packed = [weight for weight in weights_of(decoder) if isinstance(weight, QuantizedWeight)]
    plain = max(parameter.nbytes for parameter in decoder.parameters())
    one = max(4 * math.prod(weight.shape[-2:]) for weight in packed)
    with Largest() as largest:
        tiny.run_target(decoder, [5])
    assert one <= largest.nbytes <= max(one, plain, 8 * (1 << 16))  # of `_orders`


Q = "model.layers.0.self_attn.q_proj"
WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    (
        "no scales",
        lambda t: t.pop(f"{Q}.weight_scale_inv"),
        rf"missing tensors: {Q}\.weight_scale_inv",
    ),
    (
        "none at all",
        lambda t: [t.pop(name) for name in [*t] if name.endswith("weight_scale_inv")],
        r"down_proj\.weight is torch\.float8_e4m3fn, and no scales are found for it",
    ),
    (
        "NaN",
        lambda t: t[f"{Q}.weight_scale_inv"].fill_(float("nan")),
        rf"its tensor {Q}\.weight_scale_inv holds NaN or infinite values",
    ),
    (
        "negative",
        lambda t: t[f"{Q}.weight_scale_inv"].fill_(-1.0),
        rf"{Q}\.weight_scale_inv: FP8 weights have scales below 0",
    ),
    (
        "shape",
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(3, 2)}),
        rf"{Q}\.weight_scale_inv has shape \[3, 2\], expected \[2, 2\]",
    ),
    (
        "dtype of scales",
        lambda t: t.update({f"{Q}.weight_scale_inv": torch.ones(2, 2, dtype=torch.int32)}),
        rf"{Q}\.weight_scale_inv is torch\.int32; scales are floating-point numbers",
    ),
    (
        "dtype of numbers",
        lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.bfloat16)}),
        rf"{Q}\.weight is torch\.bfloat16 and has scales, which belong to torch\.float8_e4m3fn",
    ),
    (
        "NaN number",
        lambda t: t[f"{Q}.weight"].view(torch.uint8).fill_(0x7F),
        rf"its tensor {Q}\.weight holds NaN or infinite values",
    ),
    (
        "embeddings",
        lambda t: t.update({"model.embed_tokens.weight_scale_inv": torch.ones(3, 2)}),
        r"model\.embed_tokens\.weight has scales; peagle reads FP8 in products of attention, MLP",
    ),
    (
        "norm",
        lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(2)}),
        r"model\.norm\.weight has scales; .*; vLLM serves others",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [w[1:] for w in WEIGHTS], ids=[w[0] for w in WEIGHTS]
)
def test_weights_that_do_not_fit(
    directory: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
):
    quantize(directory, "fp8 in blocks")
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)


def test_a_router_is_not_read_in_fp8(tmp_path: Path):
    directory = tiny.save_target(tmp_path / "target", "qwen3_moe")
    quantize(directory, "compressed, channel")
    tensors = load_file(directory / "model.safetensors")
    tensors["model.layers.1.mlp.gate.weight_scale"] = torch.ones(8, 1)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for read in (
        tiny.load_target,
        check_decoder,
        lambda d: [*load_layers(d, torch.float32, tiny.CPU)],
    ):
        with pytest.raises(
            InputError, match=rf"{directory}: model\.layers\.1\.mlp\.gate\.weight has"
        ):
            read(directory)


def of_integers(bits: int = 4, **more: Any) -> Settings:
    weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128, **more}
    group = {"targets": ["Linear"], "weights": weights}
    return {**compressed("tensor"), "format": "pack-quantized", "config_groups": {"a": group}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
MODELOPT = {"quant_method": "modelopt"}
SETTINGS: list[tuple[Settings, str]] = [
    ({"quant_method": "aqlm"}, "quant_method aqlm is not supported; peagle reads fp8"),
    ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes is not supported"),
    ({"bits": 4}, "quant_method None is not supported"),
    ({"quant_method": ["fp8"]}, r"quant_method \['fp8'\] is not supported"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8 weights of fmt e5m2 are not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight blocks of \[128\]"),
    ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight blocks of \[0, 128\]"),
    (compressed("group", group_size=64), r"of 8-bit float \(group 64\) are not supported"),
    (of_integers(3), "3-bit weights are not supported, only of 4 and 8 bits"),
    (
        of_integers(group_size=48),
        "weights in groups of 48 are not supported: groups of 32, 64",
    ),
    (of_integers(actorder="group"), r"inputs are in the order of their groups \(actorder group\)"),
    ({**compressed("tensor"), "config_groups": 3}, "has 3 where settings belong"),
    (
        {
            **compressed("tensor"),
            "config_groups": {"a": {**of_group("tensor"), "targets": ["re:*"]}},
        },
        r"targets \('re:\*',\): nothing to repeat|multiple repeat",
    ),
    (
        {**compressed("tensor"), "transform_config": {"config_groups": {"R1": {}}}},
        r"its weights are rotated \(transform_config\); peagle applies no transforms; vLLM does",
    ),
    (
        {**compressed("tensor"), "sparsity_config": {"format": "sparse-24-bitmask"}},
        r"sparse weights \(sparsity_config\) are not supported",
    ),
    ({**MODELOPT, "quant_algo": "NVFP4_AWQ"}, r"NVFP4_AWQ .* inputs of products are scaled"),
    ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, r"W4A8_AWQ .* inputs of products are scaled"),
    ({**MODELOPT, "quant_algo": "NVFP4_SVD"}, "NVFP4_SVD is not supported; peagle reads"),
    ({**MODELOPT, "quant_algo": "MXFP8"}, "MXFP8 is not supported; peagle reads"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ of version gemv is not supported"),
    ({"quant_method": "awq", "bits": 3}, "AWQ of 3 bits is not supported, only of 4"),
    ({**GPTQ, "bits": 3}, "3-bit weights"),
    ({**GPTQ, "sym": False}, "asymmetric GPTQ of version 1 cannot store every zero point"),
    ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, r"rules for single modules \(dynamic\)"),
    ({"quant_method": "auto-round", "bits": 2}, "auto-round of packing_format None"),
]


@pytest.mark.parametrize(("settings", "message"), SETTINGS)
def test_what_is_not_supported_is_named(directory: Path, settings: Settings, message: str):
    change_config(directory, lambda config: config.update(quantization_config=settings))
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)


QWEN3 = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_attention_heads": 32,
    "max_position_embeddings": 40_960,
}
SIZES: dict[str, tuple[Settings, float]] = {
    "gpt-oss-20b": ({"num_hidden_layers": 24, "num_local_experts": 32}, 13.5),
    "gpt-oss-120b": ({"num_hidden_layers": 36, "num_local_experts": 128}, 62),
    "qwen3-30b-a3b-fp8": (
        {
            **QWEN3,
            "architectures": ["Qwen3MoeForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "num_hidden_layers": 48,
            "num_key_value_heads": 4,
        },
        30,
    ),
    "qwen3-8b-fp8": (
        {
            **QWEN3,
            "architectures": ["Qwen3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 12_288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
        },
        9,
    ),
}
"""What published configurations say, and GiB that are enough."""
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 131_072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_key_value_heads": 8,
    "quantization_config": {"quant_method": "mxfp4"},
    "sliding_window": 128,
    "vocab_size": 201_088,
}


def index_of(directory: Path) -> None:
    """Write the index of a published directory, of which nothing else is needed."""
    config = json.loads((directory / "config.json").read_text())
    family, spec = read_values(config, "")
    names = []
    for name in [name for rule in decoder_rules(family, spec) for name in rule.theirs]:
        packed = "experts" in name and "bias" not in name and "gpt" in family.model_type
        names += [f"{name}_blocks", f"{name}_scales"] if packed else [name]
        if "qwen" in family.model_type and "_proj." in name:
            names.append(f"{name}_scale_inv")
    index = {"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_take_the_memory_that_they_should(tmp_path: Path, name: str):
    values, most = SIZES[name]
    if "gpt" in name:
        layers = GPT_OSS["layer_types"] * (values["num_hidden_layers"] // 2)
        values = {**GPT_OSS, **values, "layer_types": layers}
    else:
        values = {**values, "quantization_config": BLOCKS}
    (tmp_path / "config.json").write_text(json.dumps(values))
    index_of(tmp_path)
    stored = stored_bytes(tmp_path, torch.bfloat16)
    assert most - 1.5 < (stored.ends + stored.layers) / 2**30 <= most
    (tmp_path / "model.safetensors.index.json").unlink()
    assert stored_bytes(tmp_path, torch.bfloat16).layers > 1.8 * stored.layers

"""LoRA adapters, against W + scale * B @ A written into the target's files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from packed_targets import FORMS, pack_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.errors import InputError
from peagle.models.families import decoder_rules, read_family
from peagle.models.loading import check_decoder, load_decoder, load_ends, load_layers
from peagle.models.weights import disassemble

RANK, ALPHA = 3, 7.0
OF_LAYERS = re.compile(r"\.layers\.\d+\.(?!.*(experts|conv1d)).*\.weight")


def save_adapter(directory: Path, tensors: dict[str, Tensor], **changes: Any) -> str:
    directory.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, **changes}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return str(directory)


def factors(shape: torch.Size, name: str, rank: int = RANK) -> tuple[dict[str, Tensor], Tensor]:
    """An adapter's two tensors for a module, and their product."""
    down, up = torch.randn(rank, shape[1]) / 8, torch.randn(shape[0], rank) / 8
    module = f"base_model.model.{name.removesuffix('.weight')}"
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}, up @ down


def save_merged(target: Path, place: Path, tensors: dict[str, Tensor]) -> Path:
    place.mkdir()
    (place / "config.json").write_bytes((target / "config.json").read_bytes())
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    return place


def assert_alike(target: Path, lora: str, merged: Path) -> None:
    rules = decoder_rules(*read_family(target))
    ours = load_decoder(target, torch.float32, tiny.CPU, lora=lora)
    got = disassemble(ours, rules)
    for name, value in disassemble(load_decoder(merged, torch.float32, tiny.CPU), rules).items():
        torch.testing.assert_close(got[name], value, atol=1e-6, rtol=1.2e-7, msg=name)


@pytest.mark.parametrize("kind", tiny.KINDS)
def test_every_family_has_the_products_added(tmp_path: Path, kind: str):
    target = tiny.save_target(tmp_path / "target", kind)
    tensors, own = load_file(target / "model.safetensors"), {}
    torch.manual_seed(1)
    for name, weight in tensors.items():
        if weight.ndim == 2 and OF_LAYERS.search(name) and "vision" not in name:
            found, product = factors(weight.shape, name)
            own |= found
            tensors[name] = weight + ALPHA / RANK * product
    assert len(own) >= 4 * 2 * 2  # of each layer two at least
    lora = save_adapter(tmp_path / "adapter", own)
    assert_alike(target, lora, save_merged(target, tmp_path / "merged", tensors))


def test_scales_follow_patterns_and_roots_and_embeddings_are_transposed(tmp_path: Path):
    target = tiny.save_target(tmp_path / "target", "llama")
    tensors = load_file(target / "model.safetensors")
    first = "model.layers.0.self_attn.q_proj.weight"
    other = "model.layers.1.mlp.down_proj.weight"
    own, product = factors(tensors[first].shape, first, rank=4)
    tensors[first] += ALPHA / 2 * product
    more, product = factors(tensors[other].shape, other)
    tensors[other] += 5 / 3**0.5 * product
    down, up = torch.randn(RANK, tiny.VOCAB), torch.randn(tiny.SIZES["hidden_size"], RANK)
    embeddings = "base_model.model.model.embed_tokens.lora_embedding_"
    own |= more | {f"{embeddings}A": down, f"{embeddings}B": up}
    tensors["model.embed_tokens.weight"] += ALPHA / 3**0.5 * (up @ down).T
    patterns: dict[str, Any] = {
        "rank_pattern": {"q_proj": 4},
        "alpha_pattern": {"mlp.down_proj": 5},
    }
    lora = save_adapter(tmp_path / "adapter", own, use_rslora=True, **patterns)
    merged = save_merged(target, tmp_path / "merged", tensors)
    assert_alike(target, lora, merged)
    ends = load_ends(target, torch.float32, tiny.CPU, lora=lora)
    whole = load_decoder(merged, torch.float32, tiny.CPU)
    torch.testing.assert_close(ends.embed.weight, whole.embed.weight)
    layers = list(load_layers(target, torch.float32, tiny.CPU, lora))
    for layer, expected in zip(layers, whole.layers, strict=True):
        torch.testing.assert_close(layer.state_dict(), expected.state_dict())


def test_tied_embeddings_are_not_adapted(tmp_path: Path):
    """The adapter was trained beside the plain head, which merging would change, too."""
    target = tiny.save_target(tmp_path / "target", "qwen3", tie_word_embeddings=True)
    down, up = torch.randn(RANK, tiny.VOCAB), torch.randn(tiny.SIZES["hidden_size"], RANK)
    embeddings = "base_model.model.model.embed_tokens.lora_embedding_"
    lora = save_adapter(tmp_path / "adapter", {f"{embeddings}A": down, f"{embeddings}B": up})
    with pytest.raises(InputError, match="adapts embeddings that are the target's head, too"):
        load_decoder(target, torch.float32, tiny.CPU, lora=lora)


@pytest.mark.parametrize("apart", [True, False])
def test_experts_have_those_that_peft_stacks(tmp_path: Path, apart: bool):
    target = tiny.save_target(tmp_path / "target", "qwen3_moe" if apart else "gemma4_moe")
    tensors = load_file(target / "model.safetensors")
    place = "model.layers.0.mlp.experts" if apart else "model.layers.0.experts"
    count, inner, size = 8, 40, tiny.SIZES["hidden_size"]
    own = {}
    for parameter, outputs, inputs in (("gate_up", 2 * inner, size), ("down", size, inner)):
        down, up = torch.randn(count, RANK, inputs) / 8, torch.randn(outputs, RANK, count) / 8
        module = f"base_model.model.{place}{'.base_layer' * (parameter == 'gate_up')}"
        own[f"{module}.lora_A.weight"] = down.flatten(0, 1)
        own[f"{module}.lora_B.weight"] = up.flatten(1)
        product = ALPHA / RANK * torch.einsum("ore,eri->eoi", up, down)
        if not apart:
            tensors[f"{place}.{parameter}_proj"] += product
            continue
        for expert in range(count):
            parts = product[expert].chunk(2) if parameter == "gate_up" else [product[expert]]
            for name, part in zip(parameter.split("_"), parts, strict=True):
                tensors[f"{place}.{expert}.{name}_proj.weight"] += part
    wanted = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = save_adapter(tmp_path / "adapter", own, target_parameters=wanted)
    assert_alike(target, lora, save_merged(target, tmp_path / "merged", tensors))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is not supported; merge it with PEFT"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported; merge it"),
    ({"peft_type": "IA3"}, "peft_type IA3 is not supported, only LORA"),
    ({"bias": "all"}, "bias all is not supported"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the target's own weights"),
    ({"lora_alpha": None}, "do not fit"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(c)) for c, _ in REFUSED])
def test_other_adapters_are_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    target = tiny.save_target(tmp_path / "target", "llama")
    name = "model.layers.0.self_attn.q_proj.weight"
    own, _ = factors(torch.Size((64, 64)), name)
    with pytest.raises(InputError, match=message):
        check_decoder(target, save_adapter(tmp_path / "adapter", own, **changes))


def test_adapters_of_other_models_are_refused(tmp_path: Path):
    target = tiny.save_target(tmp_path / "target", "llama")
    own, _ = factors(torch.Size((64, 64)), "model.layers.9.self_attn.q_proj.weight")
    lora = save_adapter(tmp_path / "deeper", own)
    with pytest.raises(InputError, match=r"layers\.9\.self_attn\.q_proj\.weight, which the target"):
        check_decoder(target, lora)
    own, _ = factors(torch.Size((64, 48)), "model.layers.0.self_attn.q_proj.weight")
    with pytest.raises(InputError, match=r"\[64, 48\] to a weight of \[64, 64\]"):
        load_decoder(target, torch.float32, tiny.CPU, lora=save_adapter(tmp_path / "narrower", own))


def test_weights_in_few_bits_are_not_merged_into(tmp_path: Path):
    target = tiny.save_target(tmp_path / "target", "llama")
    own, _ = factors(torch.Size((64, 64)), "model.layers.0.self_attn.q_proj.weight")
    lora = save_adapter(tmp_path / "adapter", own)
    pack_target(target, FORMS["nvfp4 of compressed-tensors"])
    with pytest.raises(
        InputError, match=r"which the target has in NVFP4, .* give the target in 16"
    ):
        check_decoder(target, lora)


@pytest.mark.parametrize("kind", ["muse_glimmer", "gemma4_unified", "gemma3"])
def test_what_it_adds_to_a_tower_is_left_out_with_it(tmp_path: Path, kind: str):
    """PEFT's `all-linear` adapts towers, too, by the names of their modules."""
    target = tiny.save_target(tmp_path / "target", kind)
    if kind != "muse_glimmer":
        save_whole = getattr(tiny, f"save_whole_{kind}")
        target = save_whole(tmp_path / "whole", target)
    family, _ = read_family(target)
    tensors, own = load_file(target / "model.safetensors"), {}
    for name in [name for name in tensors if name.startswith(family.ignored)]:
        if tensors[name].ndim == 2 and name.endswith(".weight"):
            own |= factors(tensors[name].shape, f"model.{name.removeprefix('model.')}")[0]
    assert own
    weight = next(name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    found, product = factors(tensors[weight].shape, weight)
    tensors[weight] += ALPHA / RANK * product
    lora = save_adapter(tmp_path / "adapter", own | found)
    assert_alike(target, lora, save_merged(target, tmp_path / "merged", tensors))

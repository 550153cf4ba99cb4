"""Targets whose files hold the same values in other tensors: each beside the usual layout."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_quantization import quantize
from torch import Tensor
from transformers import AutoModelForCausalLM

from peagle.errors import InputError
from peagle.models.loading import check_decoder, load_ends, load_layers, stored_bytes

TOKENS = list(range(3, 60))
Tensors = dict[str, Tensor]


def change_tensors(directory: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def logits(directory: Path) -> Tensor:
    return tiny.run_target(tiny.load_target(directory), TOKENS)[0]


def assert_read_alike(directory: Path, plain: Path) -> None:
    """Whole, in parts and checked, as the usual layout."""
    check_decoder(directory)
    assert torch.equal(logits(directory), logits(plain))
    loaded = tiny.load_target(plain)
    for one, other in zip(
        load_layers(directory, torch.float32, tiny.CPU), loaded.layers, strict=True
    ):
        wanted = other.state_dict()
        assert all(torch.equal(value, wanted[name]) for name, value in one.state_dict().items())
    ends = load_ends(directory, torch.float32, tiny.CPU)
    assert torch.equal(ends.embed.weight, loaded.embed.weight)
    assert torch.equal(ends.head.weight, loaded.head.weight)
    assert stored_bytes(directory, torch.float32) == stored_bytes(plain, torch.float32)


def fuse(tensors: Tensors) -> None:
    """Put q, k and v, and gate and up, in one tensor each, as Phi-3's files have them."""
    for name in [*tensors]:
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")):
            names = [name.replace(parts[0], part) for part in parts]
            if f".{parts[0]}." in name and all(each in tensors for each in names):
                fused = "qkv_proj" if len(parts) == 3 else "gate_up_proj"
                joined = torch.cat([tensors.pop(each) for each in names])
                tensors[name.replace(parts[0], fused)] = joined


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4"])
def test_fused_projections(tmp_path: Path, family: str):
    plain = tiny.save_target(tmp_path / "plain", family)
    directory = tiny.save_target(tmp_path / "fused", family)
    change_tensors(directory, fuse)
    assert "qkv_proj" in " ".join(load_file(directory / "model.safetensors"))
    assert_read_alike(directory, plain)


def test_projections_apart_of_a_family_that_fuses_them(tmp_path: Path):
    plain, directory = (tiny.save_target(tmp_path / name, "phi3") for name in ("plain", "apart"))

    def split(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "qkv_proj" in name]:
            parts = tensors.pop(name).split((64, 32, 32))
            for part, value in zip("qkv", parts, strict=True):
                tensors[name.replace("qkv_proj", f"{part}_proj")] = value.clone()

    change_tensors(directory, split)
    assert_read_alike(directory, plain)


def test_fused_projections_with_biases(tmp_path: Path):
    biases = {"attention_bias": True, "mlp_bias": True}
    plain = tiny.save_target(tmp_path / "plain", "llama", **biases)
    directory = tiny.save_target(tmp_path / "fused", "llama", **biases)
    change_tensors(directory, fuse)
    assert "model.layers.0.mlp.gate_up_proj.bias" in load_file(directory / "model.safetensors")
    assert_read_alike(directory, plain)


def test_one_layer_may_be_fused_and_another_apart(tmp_path: Path):
    plain = tiny.save_target(tmp_path / "plain", "llama")
    directory = tiny.save_target(tmp_path / "mixed", "llama")

    def fuse_last(tensors: Tensors) -> None:
        last = {name: tensors.pop(name) for name in [*tensors] if ".layers.3." in name}
        fuse(last)
        tensors.update(last)

    change_tensors(directory, fuse_last)
    assert_read_alike(directory, plain)


def test_a_part_beside_the_fused_whole_is_named(tmp_path: Path):
    directory = tiny.save_target(tmp_path, "llama")
    part = "model.layers.1.self_attn.k_proj.weight"

    def leave_one(tensors: Tensors) -> None:
        kept = tensors[part].clone()
        fuse(tensors)
        tensors[part] = kept

    change_tensors(directory, leave_one)
    with pytest.raises(InputError, match=r"layers\.1\.self_attn\.qkv_proj\.weight"):
        tiny.load_target(directory)


def test_experts_of_qwen3_together(tmp_path: Path):
    """As transformers writes what it has in memory."""
    plain = tiny.save_target(tmp_path / "plain", "qwen3_moe")
    directory = tmp_path / "together"
    model = AutoModelForCausalLM.from_pretrained(plain)
    model.save_pretrained(directory, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(directory / "model.safetensors")
    assert_read_alike(directory, plain)


def take_apart(tensors: Tensors) -> None:
    """Give each expert tensors of its own, as vLLM reads them."""
    for name in [name for name in tensors if ".experts." in name]:
        place, _, kind = name.rpartition(".")
        for index, value in enumerate(tensors.pop(name)):
            parts = value.chunk(2) if kind == "gate_up_proj" else [value]
            kinds = ["gate_proj", "up_proj"] if len(parts) == 2 else [kind]
            for own, part in zip(kinds, parts, strict=True):
                tensors[f"{place}.{index}.{own}.weight"] = part.contiguous()


def test_experts_of_gemma_4_apart(tmp_path: Path):
    plain = tiny.save_target(tmp_path / "plain", "gemma4_moe")
    directory = tiny.save_target(tmp_path / "apart", "gemma4_moe")
    change_tensors(directory, take_apart)
    assert_read_alike(directory, plain)


@pytest.mark.parametrize(
    ("family", "change", "weight"),
    [
        ("llama", fuse, "self_attn.qkv_proj.weight"),
        ("gemma4_moe", take_apart, "experts.7.up_proj.weight"),
    ],
)
@pytest.mark.parametrize("layout", ["fp8 in blocks", "compressed, channel", "AutoFP8"])
def test_other_layouts_in_fp8(
    tmp_path: Path, family: str, change: Callable[[Tensors], None], weight: str, layout: str
):
    directory = tiny.save_target(tmp_path / "target", family)
    change_tensors(directory, change)
    twin = quantize(directory, layout)
    packed = load_file(directory / "model.safetensors")
    assert packed[f"model.layers.0.{weight}"].dtype == torch.float8_e4m3fn
    check_decoder(directory)
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_buffers_and_scales_that_no_file_needs(tmp_path: Path):
    """Rotary tables of old files, a cache's scales beside weights of 16 bits."""
    plain = tiny.save_target(tmp_path / "plain", "llama")
    directory = tiny.save_target(tmp_path / "old", "llama")
    attention = "model.layers.1.self_attn"
    names = [
        "model.rotary_emb.inv_freq",
        f"{attention}.rotary_emb.inv_freq",
        f"{attention}.rotary_emb.cos_cached",
        f"{attention}.rotary_emb.sin_cached",
        f"{attention}.kv_scale",
        f"{attention}.k_scale",
        f"{attention}.attn.v_scale",
        f"{attention}.attn.prob_scale",
        f"{attention}.q_scale",
        f"{attention}.k_proj.output_scale",
        f"{attention}.v_proj.v_scale",
    ]
    change_tensors(directory, lambda t: t.update({name: torch.full((8,), 9.0) for name in names}))
    assert_read_alike(directory, plain)


def test_a_scale_of_inputs_beside_weights_that_are_not_quantized_is_named(tmp_path: Path):
    directory = tiny.save_target(tmp_path, "llama")
    name = "model.layers.1.self_attn.k_proj.input_scale"
    change_tensors(directory, lambda t: t.update({name: torch.ones(())}))
    with pytest.raises(InputError, match=r"unexpected tensors: .*k_proj\.input_scale"):
        tiny.load_target(directory)


def test_a_stale_index_beside_one_file(tmp_path: Path):
    """Some of what it names is not there: as transformers, we read the one file."""
    plain = tiny.save_target(tmp_path / "plain", "llama")
    directory = tiny.save_target(tmp_path / "stale", "llama")
    files = {"model.norm.weight": "model-1.safetensors", "lm_head.weight": "model-2.safetensors"}
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}))
    save_file({"model.norm.weight": torch.zeros(64)}, directory / "model-1.safetensors")
    assert_read_alike(directory, plain)


@pytest.mark.parametrize("family", ["llama", "gemma4"])
def test_a_tied_model_whose_one_tensor_is_its_head(tmp_path: Path, family: str):
    plain = tiny.save_target(tmp_path / "plain", family, tie_word_embeddings=True)
    directory = tiny.save_target(tmp_path / "head", family, tie_word_embeddings=True)
    embeddings = "model.embed_tokens.weight"
    change_tensors(directory, lambda t: t.update({"lm_head.weight": t.pop(embeddings)}))
    assert_read_alike(directory, plain)
    decoder = tiny.load_target(directory)
    assert decoder.head.weight is decoder.embed.weight


def test_an_untied_model_needs_its_embeddings(tmp_path: Path):
    directory = tiny.save_target(tmp_path, "llama", tie_word_embeddings=False)
    change_tensors(directory, lambda t: t.pop("model.embed_tokens.weight"))
    with pytest.raises(InputError, match=r"missing tensors: model\.embed_tokens\.weight"):
        tiny.load_target(directory)

"""Qwen3.5 to 3.8: as transformers computes them, as their publishers write them, and what is not
read."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_families import Values, change_config
from test_quantization import E4M3
from transformers import AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.drafters.mtp import load_mtp, save_mtp, trainable_mtp
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models.families import read_spec
from peagle.models.loading import check_decoder, load_ends, load_layers
from peagle.models.weights import read_json, read_tensors
from peagle.ops.weight import QuantizedWeight, weights_of
from saving import save_target

FAMILIES = ["qwen3_5", "qwen3_5_moe"]
TOKENS = [(7 * i + i * i) % 95 for i in range(200)]


def logits(directory: Path, count: int = 60) -> torch.Tensor:
    return tiny.run_target(tiny.load_target(directory), TOKENS[:count])[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_prompts_of_any_length_are_transformers(tmp_path: Path, family: str, tied: bool):
    directory = tiny.save_target(tmp_path / "target", family, tie_word_embeddings=tied)
    peer = AutoModelForCausalLM.from_pretrained(directory).eval()
    decoder = tiny.load_target(directory)
    for count in (1, 3, 4, 63, 64, 65, 200):
        expected = peer(torch.tensor([TOKENS[:count]])).logits[0]
        found = tiny.run_target(decoder, TOKENS[:count])[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 8, "layer_types": None, "full_attention_interval": 2},
        {"linear_num_key_heads": 1, "linear_num_value_heads": 3},
        {"linear_conv_kernel_dim": 2},
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    ],
    ids=["every second", "three share", "a shorter convolution", "as published"],
)
def test_other_sizes(tmp_path: Path, sizes: Values):
    directory = tiny.save_target(tmp_path / "target", "qwen3_5", **sizes)
    peer = AutoModelForCausalLM.from_pretrained(directory).eval()
    expected = peer(torch.tensor([TOKENS[:60]])).logits[0]
    torch.testing.assert_close(logits(directory), expected, atol=1e-4, rtol=1e-4)


def test_published_directories_hold_a_tower_and_more_heads(tmp_path: Path):
    text = tiny.add_mtp(tiny.save_target(tmp_path / "text", "qwen3_5"))
    tower = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16}
    config = Qwen3_5Config(
        text_config=AutoModelForCausalLM.from_pretrained(text).config.to_dict(),
        vision_config={**tower, "out_hidden_size": 64},
    )
    model = Qwen3_5ForConditionalGeneration(config)
    inner = AutoModelForCausalLM.from_pretrained(text)
    model.model.language_model.load_state_dict(inner.model.state_dict())
    model.lm_head.load_state_dict(inner.lm_head.state_dict())
    model.save_pretrained(tmp_path / "whole")
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    own = load_file(text / "model.safetensors")
    tensors |= {name: value for name, value in own.items() if name.startswith("mtp.")}
    save_file(tensors, tmp_path / "whole" / "model.safetensors", {"format": "pt"})
    check_decoder(tmp_path / "whole")
    assert torch.equal(logits(tmp_path / "whole"), logits(text))
    heads = [load_mtp(path, tiny.load_target(path)) for path in (tmp_path / "whole", text)]
    assert all(map(torch.equal, *(head.state_dict().values() for head in heads)))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_again_is_what_was_read(tmp_path: Path, family: str):
    directory = tiny.save_target(tmp_path / "target", family)
    (tmp_path / "again").mkdir()
    parts = (load(directory, torch.float32, tiny.CPU) for load in (load_ends, load_layers))
    save_target(tmp_path / "again", read_json(directory / "config.json"), *parts)
    torch.testing.assert_close(logits(tmp_path / "again"), logits(directory), atol=1e-5, rtol=0)
    before, after = read_tensors(directory), read_tensors(tmp_path / "again")
    for name in before.keys() & after.keys():  # experts are one by one in the first
        torch.testing.assert_close(after[name], before[name], atol=1e-6, rtol=0)
    assert family == "qwen3_5_moe" or before.keys() == after.keys()


def test_norms_and_decays_stay_in_float32(tmp_path: Path):
    directory = tiny.save_target(tmp_path / "target", "qwen3_5")
    decoder = tiny.load_target(directory, torch.bfloat16)
    recurrent, attending = decoder.layers[0], decoder.layers[1]
    exact = [recurrent.input_norm.weight, attending.attention.qk_norm.weight, decoder.norm.weight]
    exact += [recurrent.delta_net.decay, recurrent.delta_net.decay_bias]
    assert {value.dtype for value in exact} == {torch.float32}
    assert recurrent.delta_net.qkvz.weight.dtype == torch.bfloat16
    [first, *_] = load_layers(directory, torch.bfloat16, tiny.CPU)
    assert first.input_norm.weight.dtype == torch.float32


def in_blocks(directory: Path) -> Path:
    """Put products into FP8 as Qwen does, in blocks with scales in bfloat16, experts one by one;
    returns a dequantised twin."""
    tensors = load_file(directory / "model.safetensors")
    together = [name for name, tensor in tensors.items() if tensor.ndim == 3 and "experts" in name]
    for name in together:
        for expert, weight in enumerate(tensors.pop(name)):
            stem = f"{name.rpartition('.')[0]}.{expert}"
            parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            for part, own in zip(parts, weight.chunk(len(parts)), strict=True):
                tensors[f"{stem}.{part}.weight"] = own.clone()
    twin, packed = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight") and "in_proj" not in name:
            continue
        if "in_proj_a" in name or "in_proj_b" in name:
            continue
        rows, columns = (-(-size // 32) for size in weight.shape)
        scales = (torch.rand(rows, columns) * 2e-3 + 1e-3).bfloat16()
        wide = scales.float().repeat_interleave(32, 0).repeat_interleave(32, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        packed[name] = (weight / wide).clamp(-448, 448).to(E4M3)
        packed[f"{name}_scale_inv"] = scales
        twin[name] = packed[name].float() * wide
    beside = directory.parent / "twin"
    beside.mkdir()
    (beside / "config.json").write_text((directory / "config.json").read_text())
    save_file(twin, beside / "model.safetensors", {"format": "pt"})
    save_file(packed, directory / "model.safetensors", {"format": "pt"})
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
    change_config(directory, lambda config: config.update(quantization_config=blocks))
    return beside


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head_dim", [16, 64], ids=["heads within a block", "blocks within a head"])
def test_fp8_in_blocks(tmp_path: Path, family: str, head_dim: int):
    directory = tiny.save_target(tmp_path / "target", family, head_dim=head_dim)
    twin = in_blocks(directory)
    check_decoder(directory)
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("own", [False, True], ids=["drafter", "its own head, but for fc in FP8"])
def test_text_in_fp8_is_the_same_with_drafts(tmp_path: Path, family: str, own: bool):
    directory = tiny.add_mtp(tiny.save_target(tmp_path / "target", family))
    in_blocks(directory)
    stored = load_file(directory / "model.safetensors")
    assert stored["mtp.layers.0.self_attn.q_proj.weight"].dtype == E4M3
    assert stored["mtp.fc.weight"].dtype == torch.float32
    decoder = tiny.load_target(directory)
    if own:
        drafter = drafter_for(load_mtp(directory, decoder))
    else:
        config = tiny.drafter_config(parallel=True)
        drafter = tiny.random_drafter_for(decoder, tmp_path / "drafter", config)
    how, prompts = SamplingParams(max_tokens=20), [TOKENS[:9], TOKENS[20:50]]
    config = tiny.engine_config()
    plain = tiny.run(Engine(decoder, None, 0, config), prompts, how)
    drafted = tiny.run(Engine(decoder, drafter, 5, config), prompts, how)
    assert tiny.outputs(plain) == tiny.outputs(drafted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_in_fp8_is_trained_and_written_in_full(tmp_path: Path, family: str):
    """Its `config.json` names no quantization then."""
    directory = tiny.add_mtp(tiny.save_target(tmp_path / "target", family))
    in_blocks(directory)
    target = tiny.load_target(directory)
    model = trainable_mtp(directory, target, 64)
    assert all(p.requires_grad for own in model.own for p in own.parameters())
    save_mtp(tmp_path / "head", model, directory, torch.float32)
    assert "quantization_config" not in (tmp_path / "head" / "config.json").read_text()
    names = load_file(tmp_path / "head" / "model.safetensors").keys()
    assert {f"{name}_scale_inv" for name in names} & load_file(
        directory / "model.safetensors"
    ).keys(), "called as in the target's files"
    packed, plain = (load_mtp(place, target) for place in (directory, tmp_path / "head"))
    assert not any(isinstance(w, QuantizedWeight) for own in packed.own for w in weights_of(own))
    positions = torch.arange(5)
    rows = positions, torch.randn(5, 64), positions, tiny.causal
    torch.testing.assert_close(packed(*rows), plain(*rows), atol=1e-4, rtol=1e-4)


CONFIGS: list[tuple[str, Callable[[Values], object], str]] = [
    ("another gate", lambda c: c.update(output_gate_type="sigmoid"), "output_gate_type sigmoid"),
    ("no gate", lambda c: c.update(attn_output_gate=False), "attn_output_gate false"),
    (
        "a type",
        lambda c: c.update(layer_types=["mamba"] * 4),
        "layers of type mamba are not supported",
    ),
    ("types", lambda c: c.update(layer_types=["full_attention"]), "layer_types names 1 of 4"),
    (
        "heads",
        lambda c: c.update(linear_num_value_heads=3),
        "3 value heads cannot share 2 key heads",
    ),
    (
        "no heads",
        lambda c: c.update(linear_num_key_heads=0),
        "linear_num_key_heads is 0; it must be at least 1",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [row[1:] for row in CONFIGS], ids=[*map(str, range(len(CONFIGS)))]
)
def test_what_is_not_supported_is_named(
    tmp_path: Path, change: Callable[[Values], object], message: str
):
    directory = tiny.save_target(tmp_path / "target", "qwen3_5")
    change_config(directory, change)
    with pytest.raises(InputError, match=message):
        read_spec(directory)


def test_states_of_few_bits_are_kept_in_float32_and_said(tmp_path: Path):
    directory = tiny.save_target(tmp_path / "target", "qwen3_5")
    change_config(directory, lambda config: config.update(mamba_ssm_dtype="bfloat16"))
    with pytest.warns(UserWarning, match="mamba_ssm_dtype is bfloat16; states are kept in float32"):
        read_spec(directory)

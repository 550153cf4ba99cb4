"""What a target's directory may hold; that it computes the right thing is invariant 3's test."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from peagle.drafters.checkpoint import load_drafter
from peagle.errors import InputError
from peagle.models.loading import decoder_rules, load_decoder, load_ends
from peagle.models.weights import disassemble

Values = dict[str, Any]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save_target(tmp_path / "target")


def change_config(directory: Path, change: Callable[[Values], object]) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


CONFIGS: list[tuple[str, Callable[[Values], object], str]] = [
    (
        "architecture",
        lambda c: c.update(architectures=["MixtralForCausalLM"]),
        "architecture MixtralForCausalLM is not supported; peagle runs GptOssForCausalLM, "
        "LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM; vLLM serves other targets",
    ),
    ("none", lambda c: c.pop("architectures"), "architecture none is not supported"),
    ("missing key", lambda c: c.pop("intermediate_size"), "config.json lacks intermediate_size"),
    ("kind", lambda c: c.update(vocab_size="many"), "a value of the wrong kind: invalid literal"),
    (
        "rope",
        lambda c: c.update(rope_parameters={"rope_type": "longrope", "rope_theta": 1.0}),
        "target: rope scaling longrope is not supported; peagle has default, linear, llama3, yarn",
    ),
    ("activation", lambda c: c.update(hidden_act="gelu"), "hidden_act gelu is not supported"),
    (
        "window",
        lambda c: c.update(use_sliding_window=True, sliding_window=64),
        "sliding-window attention is not supported",
    ),
    (
        "quantized",
        lambda c: c.update(quantization_config={"quant_method": "mxfp4"}),
        "quantized weights are not supported",
    ),
    ("no layers", lambda c: c.update(num_hidden_layers=0), "num_hidden_layers is 0; it must be"),
    (
        "heads",
        lambda c: c.update(num_key_value_heads=3),
        "4 attention heads cannot share 3 key-value heads evenly",
    ),
    ("odd heads", lambda c: c.update(head_dim=15), "head_dim 15 is odd"),
    (
        "sizes",
        lambda c: c.update(intermediate_size=100),
        r"does not match its config\.json: .*down_proj\.weight has shape \[64, 128\], expected",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [c[1:] for c in CONFIGS], ids=[c[0] for c in CONFIGS]
)
def test_configurations_that_cannot_be_run(
    directory: Path, change: Callable[[Values], object], message: str
):
    change_config(directory, change)
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)
    assert "wrong kind: " not in str(caught.value) or "wrong kind" in message


EXPERT_CONFIGS: list[tuple[str, Callable[[Values], object], str]] = [
    (
        "sparse step",
        lambda c: c.update(decoder_sparse_step=2),
        r"dense layers among those with experts \(decoder_sparse_step 2, mlp_only_layers \[\]\) "
        "are not supported; vLLM serves them",
    ),
    ("dense layers", lambda c: c.update(mlp_only_layers=[0]), r"mlp_only_layers \[0\]"),
    ("missing", lambda c: c.pop("moe_intermediate_size"), "json lacks moe_intermediate_size"),
    ("missing count", lambda c: c.pop("num_local_experts"), "json lacks num_experts"),
    ("kind", lambda c: c.update(num_experts_per_tok="few"), "a value of the wrong kind"),
    ("none", lambda c: c.update(num_local_experts=0), "num_experts is 0; it must be at least 1"),
    (
        "none per token",
        lambda c: c.update(num_experts_per_tok=0),
        "num_experts_per_tok is 0; it must be at least 1",
    ),
    (
        "too many per token",
        lambda c: c.update(num_experts_per_tok=9),
        "num_experts_per_tok is 9; it must be at most num_experts, 8",
    ),
    (
        "sizes",
        lambda c: c.update(moe_intermediate_size=48),
        r"experts\.0\.down_proj\.weight has shape \[64, 40\], expected \[64, 48\]",
    ),
    (
        "fewer experts",
        lambda c: c.update(num_local_experts=7),
        r"unexpected tensors: .*experts\.7\.down_proj\.weight.*"
        r"mlp\.gate\.weight has shape \[8, 64\], expected \[7, 64\]",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [c[1:] for c in EXPERT_CONFIGS], ids=[c[0] for c in EXPERT_CONFIGS]
)
def test_experts_that_cannot_be_run(
    tmp_path: Path, change: Callable[[Values], object], message: str
):
    directory = tiny.save_target(tmp_path / "target", "qwen3_moe")
    change_config(directory, change)
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)


def test_published_directories_count_experts_under_another_name(tmp_path: Path):
    directory = tiny.save_target(tmp_path, "qwen3_moe")
    saved = tiny.load_target(directory).config
    change_config(directory, lambda c: c.update(num_experts=c.pop("num_local_experts")))
    assert tiny.load_target(directory).config == saved


def test_an_expert_that_is_missing_is_named(tmp_path: Path):
    directory = tiny.save_target(tmp_path, "qwen3_moe")
    name = "model.layers.2.mlp.experts.5.up_proj.weight"
    change_tensors(directory, lambda t: t.pop(name))
    with pytest.raises(InputError, match=f"missing tensors: {re.escape(name)}$"):
        tiny.load_target(directory)


@pytest.mark.parametrize("family", tiny.KINDS)
def test_a_decoder_is_taken_apart_into_the_tensors_it_came_from(tmp_path: Path, family: str):
    directory = tiny.save_target(tmp_path, family)
    decoder = tiny.load_target(directory)
    again = disassemble(decoder, decoder_rules(decoder.config))
    saved = load_file(directory / "model.safetensors")
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[name], value) for name, value in saved.items())


def test_a_drafter_of_a_target_with_experts_is_dense(tmp_path: Path):
    target = tiny.load_target(tiny.save_target(tmp_path / "target", "qwen3_moe"))
    tiny.save_random_drafter(tmp_path / "drafter", tiny.drafter_config(parallel=True))
    change_config(tmp_path / "drafter", lambda c: c.update(tiny.EXPERTS))
    drafter = load_drafter(tmp_path / "drafter", target)
    assert not drafter.config.transformer.num_experts


WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    ("missing", lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight"),
    ("more", lambda t: t.update(other=torch.ones(1)), "unexpected tensors: other"),
    (
        "NaN",
        lambda t: t["lm_head.weight"][3].fill_(float("nan")),
        r"tensor lm_head\.weight holds NaN or infinite values",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [w[1:] for w in WEIGHTS], ids=[w[0] for w in WEIGHTS]
)
def test_weights_that_do_not_fit(directory: Path, change: Callable[..., object], message: str):
    assert_weights_are_refused(directory, change, message)


def assert_weights_are_refused(directory: Path, change: Callable[..., object], message: str):
    change_tensors(directory, change)
    with pytest.raises(InputError, match=message):
        tiny.load_target(directory)


def test_tied_embeddings_are_one_parameter(tmp_path: Path):
    decoder = tiny.load_target(tiny.save_target(tmp_path, tie_word_embeddings=True))
    assert decoder.head.weight is decoder.embed.weight


def test_the_longest_length_can_be_set(directory: Path):
    decoder = load_decoder(directory, torch.float32, tiny.CPU, max_length=40)
    assert decoder.rotations.shape[0] == 40
    assert tiny.load_target(directory).rotations.shape[0] == 256


@pytest.mark.parametrize("tied", [True, False])
def test_the_ends_alone_are_those_of_the_whole(tmp_path: Path, tied: bool):
    """And of the layers nothing is read, damaged as they may be."""
    whole = tiny.load_target(tiny.save_target(tmp_path, tie_word_embeddings=tied))
    change_tensors(tmp_path, lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf))
    ends = load_ends(tmp_path, torch.float32, tiny.CPU)
    assert ends.config == whole.config
    assert not len(ends.layers)
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ends.state_dict().items())
    assert {name.split(".")[0] for name in ends.state_dict()} == {"embed", "norm", "head"}


def test_ends_that_are_missing_are_named(directory: Path):
    change_tensors(directory, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(InputError, match=r"missing tensors: model\.norm\.weight"):
        load_ends(directory, torch.float32, tiny.CPU)

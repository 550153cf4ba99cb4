"""A target's directory, read whole, in parts, and written back."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from peagle.errors import InputError
from peagle.models.families import decoder_rules, read_family
from peagle.models.loading import check_decoder, load_decoder, load_ends, load_layers
from peagle.models.weights import disassemble


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save_target(tmp_path / "target")


def change_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


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
    named, spec = read_family(directory)
    again = disassemble(decoder, decoder_rules(named, spec))
    saved = load_file(directory / "model.safetensors")
    saved = {name: value for name, value in saved.items() if not name.startswith(named.ignored)}
    assert again.keys() == saved.keys()
    for name, value in saved.items():
        least = 1e-7 if tiny.stands_beside_one(family, name) else 0  # what such norms lose
        torch.testing.assert_close(again[name], value, atol=least, rtol=0)


WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], object], str]] = [
    ("missing", lambda t: t.pop("model.norm.weight"), r"missing tensors: model\.norm\.weight"),
    ("more", lambda t: t.update(other=torch.ones(1)), "unexpected tensors: other"),
    (
        "eight bits",
        lambda t: t.update({"model.norm.weight": t["model.norm.weight"].to(torch.float8_e4m3fn)}),
        r"model\.norm\.weight is torch\.float8_e4m3fn, and no scales are found for it",
    ),
    (
        "infinity below",
        lambda t: t["lm_head.weight"][3].fill_(-float("inf")),
        r"tensor lm_head\.weight holds NaN or infinite values",
    ),
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


def test_a_head_that_the_configuration_denies_is_kept_and_said(tmp_path: Path):
    """Loaded whole or in parts, and checked; an equal one is the embeddings."""
    tiny.save_target(tmp_path, tie_word_embeddings=True)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": embeddings.clone()}))
    decoder = tiny.load_target(tmp_path)
    assert decoder.head.weight is decoder.embed.weight
    own = embeddings.flip(0).contiguous()
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": own}))
    said = r"config\.json ties the head .* another head; this one is used, .*\(vLLM drops it\)"
    with pytest.warns(UserWarning, match=said):
        decoder = tiny.load_target(tmp_path)
    with pytest.warns(UserWarning, match=said):
        ends = load_ends(tmp_path, torch.float32, tiny.CPU)
    with pytest.warns(UserWarning, match=said):
        check_decoder(tmp_path)
    with pytest.warns(UserWarning, match=said):
        layers = [*load_layers(tmp_path, torch.float32, tiny.CPU)]
    assert torch.equal(decoder.head.weight, own)
    assert torch.equal(ends.head.weight, own)
    assert torch.equal(ends.embed.weight, embeddings)
    assert len(layers) == 4


def test_a_misshapen_head_beside_tied_embeddings_is_named(tmp_path: Path):
    tiny.save_target(tmp_path, tie_word_embeddings=True)
    change_tensors(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(5, 64)}))
    with (
        pytest.warns(UserWarning, match="another head"),
        pytest.raises(
            InputError, match=r"lm_head\.weight has shape \[5, 64\], expected \[96, 64\]"
        ),
    ):
        tiny.load_target(tmp_path)


def test_the_longest_length_can_be_set(directory: Path):
    decoder = load_decoder(directory, torch.float32, tiny.CPU, max_length=40)
    assert decoder.max_length == 40
    assert tiny.load_target(directory).max_length == 256


@pytest.mark.parametrize("tied", [True, False])
def test_the_ends_alone_are_those_of_the_whole(tmp_path: Path, tied: bool):
    """And no layer is read, even a damaged one."""
    whole = tiny.load_target(tiny.save_target(tmp_path, tie_word_embeddings=tied))
    change_tensors(tmp_path, lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(torch.inf))
    ends = load_ends(tmp_path, torch.float32, tiny.CPU)
    assert ends.spec == whole.spec
    assert not len(ends.layers)
    expected = whole.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ends.state_dict().items())
    assert {name.split(".")[0] for name in ends.state_dict()} == {"embed", "norm", "head"}


def test_ends_that_are_missing_are_named(directory: Path):
    change_tensors(directory, lambda t: t.pop("model.norm.weight"))
    with pytest.raises(InputError, match=r"missing tensors: model\.norm\.weight"):
        load_ends(directory, torch.float32, tiny.CPU)

"""Targets written again from their parts, in the format in which they were read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from test_quantization import quantize

from peagle.models.decoder import DecoderLayer
from peagle.models.families import read_family
from peagle.models.loading import load_ends, load_layers
from peagle.models.weights import read_json, read_tensors, safetensors_files
from saving import save_target

LAYOUTS = [
    "fp8 in blocks",
    "fp8 whole",
    "AutoFP8",
    "AutoFP8, channel",
    "compressed, channel",
    "modelopt, channel",
]


def written_again(directory: Path) -> Path:
    """A copy of a target, made of what was loaded."""
    copy = directory.parent / "copy"
    copy.mkdir()
    ends = load_ends(directory, torch.float32, tiny.CPU)
    layers = load_layers(directory, torch.float32, tiny.CPU)
    save_target(copy, read_json(directory / "config.json"), ends, layers)
    return copy


def assert_same_bytes(directory: Path, copy: Path, family: str = "qwen3") -> None:
    """Whatever was read is written, in its type; scales may come with sizes of 1."""
    wanted, found = read_tensors(directory), read_tensors(copy)
    left_out = read_family(directory)[0].ignored
    kept = {name for name in wanted if not name.startswith(left_out)}
    assert found.keys() == {name for name in kept if "input_scale" not in name}
    for name, tensor in found.items():
        one, other = (each.squeeze() for each in (tensor, wanted[name]))
        assert (one.dtype, one.shape) == (other.dtype, other.shape), name
        if name.endswith("norm.weight") and tiny.stands_beside_one(
            family, name
        ):  # which loses the last bits of small ones
            torch.testing.assert_close(one, other, atol=1e-7, rtol=0)
            continue
        assert torch.equal(*(each.flatten().view(torch.uint8) for each in (one, other))), name
    assert tiny.load_target(copy).spec == tiny.load_target(directory).spec


@pytest.mark.parametrize("family", tiny.KINDS)
def test_every_family(tmp_path: Path, family: str):
    directory = tiny.save_target(tmp_path / "target", family)
    assert_same_bytes(directory, written_again(directory), family)


def test_tied_embeddings(tmp_path: Path):
    directory = tiny.save_target(tmp_path / "target", tie_word_embeddings=True)
    copy = written_again(directory)
    assert_same_bytes(directory, copy)
    assert "lm_head.weight" not in read_tensors(copy)


def test_mxfp4(tmp_path: Path):
    directory = tiny.pack_experts(tiny.save_target(tmp_path / "target", "gpt_oss"))
    copy = written_again(directory)
    assert_same_bytes(directory, copy)
    blocks = read_tensors(copy)["model.layers.0.mlp.experts.gate_up_proj_blocks"]
    assert (blocks.dtype, blocks.shape) == (torch.uint8, (8, 192, 2, 16))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_fp8(tmp_path: Path, family: str, layout: str):
    directory = tiny.save_target(tmp_path / "target", family)
    quantize(directory, layout)
    assert_same_bytes(directory, written_again(directory))


def test_fp8_of_parts_that_end_within_a_block(tmp_path: Path):
    """In memory each output has scales of its own; in the file a block of them shares some."""
    directory = tiny.save_target(tmp_path / "target", num_key_value_heads=1, head_dim=16)
    quantize(directory, "fp8 in blocks")
    assert_same_bytes(directory, written_again(directory))


def test_layers_are_written_one_by_one(tmp_path: Path):
    directory = tiny.save_target(tmp_path / "target")
    copy = tmp_path / "copy"
    copy.mkdir()
    seen = []

    def layers() -> Iterator[DecoderLayer]:
        for layer in load_layers(directory, torch.float32, tiny.CPU):
            seen.append(len([*copy.glob("*.safetensors")]))
            yield layer

    values = read_json(directory / "config.json")
    save_target(copy, values, load_ends(directory, torch.float32, tiny.CPU), layers())
    assert seen == [0, 1, 2, 3]
    index = json.loads((copy / "model.safetensors.index.json").read_text())
    files = [file.name for file in safetensors_files(copy)]
    assert files == [f"model-0000{number}-of-00005.safetensors" for number in range(1, 6)]
    assert index["weight_map"]["model.layers.2.mlp.down_proj.weight"] == files[2]
    stored = read_tensors(copy).values()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored)
    assert len({file.stat().st_mode for file in copy.iterdir()}) == 1

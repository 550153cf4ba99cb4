"""Targets that transformers runs: what their configuration says, and what is refused."""

import json
from pathlib import Path

import foreign
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import T5Config

from peagle.errors import InputError
from peagle.models.foreign import (
    ends_of,
    foreign_bytes,
    load_foreign,
    multiplied,
    read_foreign_spec,
)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign.save_foreign(tmp_path_factory.mktemp("mixtral"), "mixtral")


def test_sizes_are_the_configurations(mixtral: Path):
    spec = read_foreign_spec(mixtral)
    assert (spec.vocab_size, spec.hidden_size, len(spec.layers)) == (tiny.VOCAB, 64, 4)
    heads = spec.layers[0].attention
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (4, 2, 16)
    assert heads.rope.theta == 1e6
    assert spec.max_length == 256


def test_memory_and_products_are_counted_from_the_configuration(mixtral: Path):
    """Two of four experts are used."""
    stored = foreign_bytes(mixtral, torch.float32)
    sizes = {
        name: value.numel() for name, value in load_file(mixtral / "model.safetensors").items()
    }
    assert stored.ends + stored.layers == 4 * sum(sizes.values())
    assert stored.ends == 4 * (2 * tiny.VOCAB * 64 + 64)
    experts = sum(size for name, size in sizes.items() if "experts" in name)
    assert multiplied(mixtral) == stored.layers // 4 - experts // 2


@pytest.mark.parametrize(("kind", "scale"), [("cohere2", 0.25), ("gemma2", 1.0)])
def test_ends_without_layers_have_the_heads_scale(tmp_path: Path, kind: str, scale: float):
    spec = read_foreign_spec(foreign.save_foreign(tmp_path, kind))
    model = load_foreign(tmp_path, torch.float32, tiny.CPU, layers=False)
    ends = ends_of(model, spec)
    embeddings = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(ends.embed.weight, embeddings)
    assert torch.equal(ends.head.weight, embeddings * scale)
    assert spec.logit_softcap == (3.0 if kind == "gemma2" else None)


def test_missing_weights_are_named(mixtral: Path, tmp_path: Path):
    tensors = load_file(mixtral / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((mixtral / "config.json").read_text())
    with pytest.raises(InputError, match=r"missing or misshapen tensors: model\.norm\.weight"):
        load_foreign(tmp_path, torch.float32, tiny.CPU)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(InputError, match="transformers cannot load it"):
        load_foreign(tmp_path, torch.float32, tiny.CPU)


def test_what_transformers_cannot_train_for_is_refused(tmp_path: Path):
    T5Config(num_layers=1).save_pretrained(tmp_path)
    with pytest.raises(InputError, match="an encoder-decoder model; drafters are for"):
        read_foreign_spec(tmp_path)
    own = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    with pytest.raises(InputError, match="the model type mine; code in its directory is never run"):
        read_foreign_spec(tmp_path)

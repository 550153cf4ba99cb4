"""Units of keys and values in FP8, from the files of those who write them."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from peagle.config import EngineConfig
from peagle.engine_client.source import EngineSource
from peagle.models.kv_scales import asks_for_fp8
from peagle.models.loading import load_decoder

ATTENTION = "model.layers.1.self_attn"


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, (0.5, 0.25)),  # modelopt
        ({"k_scale": [0.5], "v_scale": [0.25]}, (0.5, 0.25)),  # compressed-tensors
        ({"k_scale": [[[0.5]], [[0.75]]], "v_scale": [[[0.25]], [[0.1]]]}, (0.75, 0.25)),
        ({"k_proj.k_scale": 0.5}, (0.5, 0.5)),
        ({"kv_scale": 0.125}, (0.125, 0.125)),
        ({}, (1.0, 1.0)),
    ],
    ids=["modelopt", "compressed-tensors", "a scale for each head", "keys alone", "both", "none"],
)
def test_scales_are_read(tmp_path: Path, named: dict, expected: tuple[float, float]) -> None:
    tiny.save_target(tmp_path)
    file = tmp_path / "model.safetensors"
    scales = {f"{ATTENTION}.{name}": torch.tensor(value) for name, value in named.items()}
    save_file(load_file(file) | scales, file, {"format": "pt"})
    decoder = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    assert decoder.layers[1].attention.heads.kv_scales == expected
    assert decoder.layers[0].attention.heads.kv_scales == (1.0, 1.0)


@pytest.mark.parametrize(
    ("values", "asks"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
        ({"kv_cache_scheme": "FP8"}, True),
        ({"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, False),
        ({"kv_cache_scheme": None}, False),
    ],
)
def test_who_asks_for_fp8(tmp_path: Path, values: dict, asks: bool) -> None:
    config = {"text_config": {"quantization_config": values}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert asks_for_fp8(tmp_path) is asks


def test_modelopts_file_beside_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    beside = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert asks_for_fp8(tmp_path)


def test_auto_keeps_the_models_type_and_says_so(tmp_path: Path) -> None:
    tiny.save_target(tmp_path)
    beside = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))

    def load(kv_cache_dtype: str) -> None:
        config = EngineConfig(kv_cache_dtype=kv_cache_dtype, kv_cache_memory=1 << 22, device="cpu")
        source = EngineSource(target=str(tmp_path), speculation=None, config=config)
        source.load(SimpleNamespace(eos_token_id=1))

    with pytest.warns(UserWarning, match="--kv-cache-dtype fp8"):
        load("auto")
    with warnings.catch_warnings(action="error"):
        load("fp8")

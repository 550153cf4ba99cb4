"""Heads as they are published, with random weights: amazon's P-EAGLE for GPT-OSS and Qwen3-Coder,
and RedHatAI's EAGLE-3 for Gemma 4."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_checkpoint import speculators_config

from peagle.config import SamplingParams
from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.kind import EAGLE3, PEAGLE
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.models.spec import AttentionSpec, LayerSpec, MLPSpec
from peagle.ops.rope import RopeConfig

LAYERS = 8
"""Of the target: its default taps are 2, 4 and 5."""
KEPT = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "max_position_embeddings",
    "attention_bias",
    "mlp_bias",
    "draft_vocab_size",
}
"""Keys of our config.json that theirs has as well."""


@pytest.fixture(params=["qwen3_moe", "gpt_oss"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A target of their families; GPT-OSS in MXFP4."""
    if request.param == "qwen3_moe":
        return tiny.save_target(tmp_path / "target", "qwen3_moe", num_hidden_layers=LAYERS)
    windows = ["sliding_attention", "full_attention"] * (LAYERS // 2)
    changes = {"num_hidden_layers": LAYERS, "layer_types": windows}
    return tiny.pack_experts(tiny.save_target(tmp_path / "target", "gpt_oss", **changes))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Four Llama layers, the first called midlayer; the whole vocabulary, with an identity map."""
    config = tiny.drafter_config(parallel=True, qk_norm=False, layers=4)
    directory = tmp_path / "head"
    save_drafter(directory, tiny.random_drafter(config))
    tensors = load_file(directory / "model.safetensors")
    tensors = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
    tensors["mask_hidden"] = tensors["mask_hidden"].view(1, 1, -1)
    tensors["d2t"] = torch.zeros(tiny.VOCAB, dtype=torch.int64)
    tensors["t2d"] = torch.ones(tiny.VOCAB, dtype=torch.bool)
    save_file(tensors, directory / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    theirs = {key: value for key, value in values.items() if key in KEPT} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "ptd_token_id": tiny.MASK,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    }
    (directory / "config.json").write_text(json.dumps(theirs))
    return directory


def test_it_fits_its_target(head: Path, target: Path):
    found = diagnose(head, target)
    assert found.problems == ()
    assert found.facts["method"] == "P-EAGLE: K tokens in one pass"
    assert found.facts["aux layers"] == "2, 4, 5 (vLLM's default; the file names none)"


def test_it_loads_as_what_it_is(head: Path, target: Path):
    model = tiny.load_drafter(head, tiny.load_target(target), PEAGLE)
    attention = model.config.layer.attention
    assert (len(model.config.transformer.layers), attention.qk_norm) == (4, False)
    assert attention.rope == RopeConfig(500000.0, "llama3", 8.0, 64)
    assert model.config.mask_token_id == tiny.MASK
    stored = load_file(head / "model.safetensors")
    query = stored["midlayer.self_attn.q_proj.weight"].float()
    assert torch.equal(model.first.attention.qkv.weight[: len(query)], query)
    assert torch.equal(model.mask_hidden, stored["mask_hidden"].flatten().float())


@pytest.fixture
def eagle3(tmp_path: Path) -> Path:
    """One Llama layer in speculators' format, whose heads together are wider than its stream, with
    embeddings of its own and a reduced vocabulary. Their layout in RedHatAI's file follows from its
    size, 4,470,642,280 bytes: 32 heads and 16 for keys of 256, 21,504 inner, 32,000 draft ids."""
    rope = RopeConfig(theta=1e6, original_max_position=256)
    layer = LayerSpec(AttentionSpec(8, 4, 16, rope=rope), MLPSpec(128))
    changes = {"layers": 1, "draft_vocab": 40, "taps": (2, 4, 5), "layer": layer}
    config = tiny.drafter_config(parallel=False, qk_norm=False, **changes)
    directory = tmp_path / "eagle3"
    save_drafter(directory, tiny.random_drafter(config))
    values = json.loads((directory / "config.json").read_text())
    theirs = speculators_config(values, "eagle3")
    (directory / "config.json").write_text(json.dumps(theirs))
    return directory


def test_an_eagle3_head_of_gemma4_drafts_for_it(eagle3: Path, tmp_path: Path):
    types = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 2
    changes = {"num_hidden_layers": LAYERS, "layer_types": types}
    directory = tiny.save_target(tmp_path / "target", "gemma4", **changes)
    found = diagnose(eagle3, directory)
    assert found.problems == ()
    assert found.facts["aux layers"] == "2, 4, 5"
    target = tiny.load_target(directory)
    model = tiny.load_drafter(eagle3, target, EAGLE3)
    stored = load_file(eagle3 / "model.safetensors")
    assert torch.equal(model.embed.weight, stored["embed_tokens.weight"].float())
    assert model.config.norm_before_residual
    how, prompts = SamplingParams(max_tokens=16), [[5, 6, 7], list(range(1, 30))]
    plain, drafted = (
        tiny.run(Engine(target, drafter, k, tiny.engine_config()), prompts, how)
        for drafter, k in ((None, 0), (drafter_for(model), 4))
    )
    assert tiny.outputs(drafted) == tiny.outputs(plain)
    assert sum(request.speculation.drafted for request in drafted) > 20

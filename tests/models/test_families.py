"""What a target's configuration may say; that it computes the right thing is invariant 3's test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

from peagle.errors import InputError
from peagle.models.families import FAMILIES, read_spec
from peagle.models.loading import load_decoder
from peagle.models.spec import MLPSpec
from peagle.ops.rope import RopeConfig

Values = dict[str, Any]
SLIDING = "sliding_attention"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save_target(tmp_path / "target")


def change_config(directory: Path, change: Callable[[Values], object]) -> None:
    file = directory / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def scale_rope(**changes: object) -> Callable[[Values], object]:
    """YaRN with some values of its own."""
    values = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **changes}
    return lambda c: c.update(rope_parameters=values)


CONFIGS: list[tuple[str, Callable[[Values], object], str]] = [
    (
        "architecture",
        lambda c: c.update(architectures=["DeepseekV3ForCausalLM"]),
        "architecture DeepseekV3ForCausalLM is not supported; peagle runs "
        f"{', '.join(sorted(FAMILIES))}; for others it trains drafters, which vLLM serves",
    ),
    ("none", lambda c: c.pop("architectures"), "architecture none is not supported"),
    ("missing key", lambda c: c.pop("intermediate_size"), "config.json lacks intermediate_size"),
    ("kind", lambda c: c.update(vocab_size="many"), "a value of the wrong kind: invalid literal"),
    (
        "rope",
        lambda c: c.update(rope_parameters={"rope_type": "dynamic", "rope_theta": 1.0}),
        "target: rope scaling dynamic is not supported; peagle supports default, linear, llama3, "
        "yarn, longrope, proportional",
    ),
    ("rope base", scale_rope(rope_theta=1.0), "rope theta is 1.0; it must be a number above 1"),
    ("rope factor", scale_rope(factor=0.0), "rope factor is 0.0; it must be a number above 0"),
    ("no rope factor", scale_rope(factor=float("nan")), "rope factor is nan"),
    (
        "rope length",
        scale_rope(original_max_position_embeddings=-8),
        "rope original_max_position is -8",
    ),
    ("rope low", scale_rope(low_freq_factor=0), "rope low_freq_factor is 0.0"),
    ("rope high", scale_rope(high_freq_factor=float("inf")), "rope high_freq_factor is inf"),
    ("rope fast", scale_rope(beta_fast=-1), "rope beta_fast is -1.0"),
    ("rope slow", scale_rope(beta_slow=-1), "rope beta_slow is -1.0"),
    (
        "rope scale",
        scale_rope(attention_factor="much"),
        "a value of the wrong kind: could not conv",
    ),
    ("no rope scale", scale_rope(attention_factor=0), "rope attention_factor is 0.0"),
    ("activation", lambda c: c.update(hidden_act="gelu"), "hidden_act gelu is not supported"),
    (
        "window",
        lambda c: c.update(use_sliding_window=True, sliding_window=0),
        "sliding_window is 0; it must be at least 1",
    ),
    (
        "windows of other layers",
        lambda c: c.update(tiny.WINDOWS, layer_types=["full_attention"] * 3),
        "layer_types names 3 of 4 layers",
    ),
    (
        "other layers",
        lambda c: c.update(layer_types=["full_attention"] * 3 + ["chunked_attention"]),
        "layers of type chunked_attention are not supported",
    ),
    (
        "rope by layer type",
        lambda c: c.update(rope_scaling={"full_attention": {}, "sliding_attention": {}}),
        r"rope settings by layer type \(full_attention, sliding_attention\) are not supported",
    ),
    ("part of a head", scale_rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5 is not"),
    (
        "part of a head, beside",
        lambda c: c.update(partial_rotary_factor=0.25),
        r"partial_rotary_factor 0\.25 is not supported, only whole heads",
    ),
    (
        "no length",
        scale_rope(factor=0.001, original_max_position_embeddings=64),
        "max_length is 0; it must be at least 1",
    ),
    (
        "quantized",
        lambda c: c.update(quantization_config={"quant_method": "mxfp4"}),
        "mxfp4 weights are supported for GPT-OSS alone; vLLM serves others",
    ),
    ("no list", lambda c: c.update(architectures={"a": 1}), "architecture none is not supported"),
    ("no layers", lambda c: c.update(num_hidden_layers=0), "num_hidden_layers is 0; it must be"),
    (
        "heads",
        lambda c: c.update(num_key_value_heads=3),
        "4 attention heads cannot share 3 key-value heads evenly",
    ),
    (
        "no heads",
        lambda c: c.update(head_dim=None, num_attention_heads=0),
        "of the wrong kind: int",
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
        r"dense layers between expert layers \(decoder_sparse_step 2, mlp_only_layers \[\]\) "
        "are not supported; vLLM serves them",
    ),
    ("dense layers", lambda c: c.update(mlp_only_layers=[0]), r"mlp_only_layers \[0\]"),
    ("missing", lambda c: c.pop("moe_intermediate_size"), "json lacks moe_intermediate_size"),
    ("missing count", lambda c: c.pop("num_local_experts"), "json lacks num_experts"),
    ("kind", lambda c: c.update(num_experts_per_tok="few"), "a value of the wrong kind"),
    (
        "none",
        lambda c: c.update(num_local_experts=0),
        "num_local_experts is 0; it must be at least 1",
    ),
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


def longrope(**changes: object) -> Values:
    """Factors for 12 lanes of a head that turn."""
    factors = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6}
    rope = {"rope_type": "longrope", **factors, **changes}
    return {"rope_parameters": rope, "partial_rotary_factor": 0.75}


NEAR_CONFIGS: dict[str, list[tuple[Values, str]]] = {
    "mistral": [
        ({"layer_types": [SLIDING, "full_attention"] * 2}, "layer_types beside sliding_window 7"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1"),
    ],
    "ministral": [({"layer_types": [SLIDING]}, "layer_types names 1 of 4 layers")],
    "ministral3": [
        (
            {"rope_parameters": {**tiny.YARN_GROWING, "llama_4_scaling_beta": -1}},
            "llama_4_scaling_beta is -1.0; it must be a number from 0 on",
        )
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers names 2 of 4 layers"),
        ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "a value of the wrong kind"),
    ],
    "phi3": [
        ({"partial_rotary_factor": 0.2}, "partial_rotary_factor 0.2 turns 3 of 16 lanes"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 turns 24 of 16 lanes"),
        (longrope(long_factor=[1.0] * 5), "rope long_factor has 5 numbers for 6 pairs of lanes"),
        (longrope(short_factor=[-1.0] * 6), "rope short_factor is -1.0; it must be a number"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "config.json lacks short_factor"),
    ],
    "gemma3": [
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not supported"),
        ({"use_bidirectional_attention": True}, "bidirectional attention is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation gelu is not supported, only"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0; it must be a number above 0"),
        ({"final_logit_softcapping": -1}, "final_logit_softcapping is -1; it must be a number"),
    ],
    "qwen3_next": [
        ({"mlp_only_layers": [1]}, "dense layers between expert layers"),
        ({"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads"),
    ],
    "gemma4_unified": [({"num_kv_shared_layers": 2}, "Gemma 4 E2B and E4B")],
    "granite": [
        ({"residual_multiplier": 0}, "residual_multiplier is 0; it must be a number above 0"),
        ({"logits_scaling": float("nan")}, "logits_scaling is nan; it must be a number above 0"),
        ({"embedding_multiplier": -1}, "embedding_multiplier is -1; it must be a number above"),
    ],
}


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [(family, *case) for family, cases in NEAR_CONFIGS.items() for case in cases],
)
def test_near_llamas_that_cannot_be_run(tmp_path: Path, family: str, values: Values, message: str):
    directory = tiny.save_target(tmp_path, family)
    change_config(directory, lambda c: c.pop("rope_parameters") and c.update(values))
    with pytest.raises(InputError, match=message):
        read_spec(directory)


MUSES: list[tuple[Values, str]] = [
    ({"attention_bias": True}, "attention_bias is not supported"),
    ({"hidden_activation": "gelu"}, "hidden_act gelu is not supported, only silu"),
    ({"qk_scale_factor": 0}, "qk_scale_factor is 0; it must be a number above 0"),
    ({"post_norm_eps": -1}, "post_norm_eps is -1.0; it must be a number from 0 on"),
    ({"layer_rope_theta": [0, 0]}, "layer_rope_theta names 2 of 4 layers"),
]


@pytest.mark.parametrize(("values", "message"), MUSES)
def test_muse_glimmers_that_cannot_be_run(tmp_path: Path, values: Values, message: str):
    directory = tiny.save_target(tmp_path, "muse_glimmer")
    change_config(directory, lambda c: c["text_config"].update(values))
    with pytest.raises(InputError, match=message):
        read_spec(directory)


def test_a_language_model_of_another_kind_within_a_mistral_3(targets, tmp_path: Path):
    directory = tiny.save_whole_mistral3(tmp_path, targets["mistral"].directory, tied=False)
    change_config(directory, lambda c: c["text_config"].update(model_type="mistral4"))
    with pytest.raises(InputError, match="a text_config of model_type mistral4 is not supported"):
        read_spec(directory)


def test_a_window_that_no_context_outgrows_is_none(tmp_path: Path):
    """Published configurations of Phi-4-mini have one of 262,144."""
    for width, expected in ((255, 255), (256, None)):
        directory = tiny.save_target(tmp_path / str(width), "phi3", sliding_window=width)
        assert read_spec(directory).layers[0].attention.window == expected


def test_published_directories_count_experts_under_another_name(tmp_path: Path):
    directory = tiny.save_target(tmp_path, "qwen3_moe")
    saved = tiny.load_target(directory).spec
    change_config(directory, lambda c: c.update(num_experts=c.pop("num_local_experts")))
    assert tiny.load_target(directory).spec == saved


def test_a_drafter_of_a_target_with_experts_is_dense(tmp_path: Path):
    target = tiny.load_target(tiny.save_target(tmp_path / "target", "qwen3_moe"))
    tiny.save_random_drafter(tmp_path / "drafter", tiny.drafter_config(parallel=True))
    change_config(tmp_path / "drafter", lambda c: c.update(tiny.EXPERTS))
    drafter = tiny.load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter.config.layer.feed_forward, MLPSpec)


@pytest.mark.parametrize("windows", [{"use_sliding_window": True}, {"layer_types": 4 * [SLIDING]}])
def test_windows_of_a_llama_are_refused(tmp_path: Path, windows: Values):
    tiny.save_target(tmp_path / "llama", "llama")
    change_config(tmp_path / "llama", lambda c: c.update(windows, sliding_window=64))
    with pytest.raises(InputError, match="sliding-window attention is not supported; vLLM serves"):
        tiny.load_target(tmp_path / "llama")


def test_windows_that_are_turned_off_are_none(directory: Path):
    change_config(directory, lambda c: c.update(tiny.WINDOWS, use_sliding_window=False))
    assert all(layer.attention.full for layer in tiny.load_target(directory).spec.layers)
    change_config(directory, lambda c: c.update(use_sliding_window=True, sliding_window=None))
    assert all(layer.attention.full for layer in tiny.load_target(directory).spec.layers)


LENGTHS: dict[str, tuple[Values | None, int]] = {
    "none": (None, 256),
    "default": ({"rope_type": "default"}, 256),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    "yarn without an original": ({"type": "yarn", "factor": 2.5}, 640),
    "shorter": ({"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32}, 32),
    "linear": ({"rope_type": "linear", "factor": 3.0}, 768),
    "linear with an original": (
        {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 128},
        512,
    ),
    "llama3": ({"rope_type": "llama3", "factor": 8.0}, 256),
}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama", "gpt_oss"])
@pytest.mark.parametrize("name", LENGTHS)
def test_the_context_that_rope_scaling_reaches(tmp_path: Path, family: str, name: str):
    scaling, length = LENGTHS[name]
    tiny.save_target(tmp_path, family, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    beside = {"rope_theta": 1e4, "rope_scaling": scaling}
    change_config(tmp_path, lambda c: c.update(beside))
    assert read_spec(tmp_path).max_length == tiny.load_target(tmp_path).max_length == length
    with pytest.raises(InputError, match=rf"{length + 1} is above the target's {length}; lower it"):
        load_decoder(tmp_path, torch.float32, tiny.CPU, length + 1)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaling_beside_ropes_by_layer_type(tmp_path: Path, kind: str):
    """As whoever extends a context writes it; transformers gives it to full layers."""
    tiny.save_target(tmp_path, "gemma3")
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 32}
    change_config(tmp_path, lambda c: c.update(rope_scaling=scaling))
    tokens = [(7 * j) % 90 for j in range(60)]
    found, _ = tiny.run_target(tiny.load_target(tmp_path), tokens)
    wanted = tiny.peer_logits(tiny.load_peer(tmp_path), tokens)
    assert torch.allclose(found, wanted, atol=2e-3)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_an_original_context_beside_the_scaling_counts_first(
    tmp_path: Path, family: str, kind: str
):
    """As transformers reads published files."""
    more = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    scaling = {"rope_type": kind, "factor": 8.0, "rope_theta": 1e4, **more}
    tiny.save_target(tmp_path, family, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    beside = {"rope_parameters": scaling, "original_max_position_embeddings": 32}
    change_config(tmp_path, lambda c: c.update(beside))
    tokens = [(7 * j) % 90 for j in range(60)]
    found, _ = tiny.run_target(tiny.load_target(tmp_path), tokens)
    wanted = tiny.peer_logits(tiny.load_peer(tmp_path), tokens)
    assert torch.allclose(found, wanted, atol=2e-3)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"rope_parameters": {"rope_type": "linear"}}, "lacks factor"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0; it must be a number from 0 on"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"vocab_size": 10**30}, "vocab_size is 1000000000000000000000000000000; it must be at"),
    ],
)
def test_values_that_no_model_has(tmp_path: Path, values: dict[str, Any], why: str):
    tiny.save_target(tmp_path)
    change_config(tmp_path, lambda c: c.update(values))
    with pytest.raises(InputError, match=why):
        tiny.load_target(tmp_path)


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_a_drafter_takes_rope_scaling_before_rope_parameters(tmp_path: Path, spelling: str):
    """Its own, in whichever of both; speculators' format has the layers' values apart."""
    target = tiny.load_target(tiny.save_target(tmp_path / "target"))
    drafter = tiny.save_random_drafter(tmp_path / "drafter", tiny.drafter_config(parallel=True))
    scaling = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 700.0}
    scaling["original_max_position_embeddings"] = 64
    values = {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}, spelling: scaling}
    for nested in (False, True):
        more = {"transformer_layer_config": values} if nested else values
        change_config(drafter, lambda c, more=more: c.update(more))
        found = tiny.load_drafter(drafter, target).config.layer.attention.rope
        assert found == RopeConfig(700.0, "llama3", 8.0, 64)

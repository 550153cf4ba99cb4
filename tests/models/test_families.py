"""What a target's configuration may say; that it computes the right thing is invariant 3's test."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from peagle.drafters.checkpoint import load_drafter
from peagle.errors import InputError
from peagle.models.spec import MLPSpec

Values = dict[str, Any]


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
        "target: rope scaling longrope is not supported; peagle supports default, linear, llama3, "
        "yarn",
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
        lambda c: c.update(use_sliding_window=True, sliding_window=64),
        "sliding-window attention is not supported",
    ),
    (
        "quantized",
        lambda c: c.update(quantization_config={"quant_method": "mxfp4"}),
        "quantized weights are not supported",
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
    saved = tiny.load_target(directory).spec
    change_config(directory, lambda c: c.update(num_experts=c.pop("num_local_experts")))
    assert tiny.load_target(directory).spec == saved


def test_a_drafter_of_a_target_with_experts_is_dense(tmp_path: Path):
    target = tiny.load_target(tiny.save_target(tmp_path / "target", "qwen3_moe"))
    tiny.save_random_drafter(tmp_path / "drafter", tiny.drafter_config(parallel=True))
    change_config(tmp_path / "drafter", lambda c: c.update(tiny.EXPERTS))
    drafter = load_drafter(tmp_path / "drafter", target)
    assert isinstance(drafter.config.layer.feed_forward, MLPSpec)

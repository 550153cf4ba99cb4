"""What a Gemma 4 target's directory may hold; that it computes the right thing is invariant 3's."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from sweeps import at_night
from test_families import Values, change_config
from test_loading import assert_weights_are_refused, change_tensors
from torch import Tensor

from peagle.config import SamplingParams
from peagle.drafters.methods import drafter_for
from peagle.errors import InputError
from peagle.models.families import read_spec
from peagle.models.loading import check_decoder, load_ends, load_layers
from peagle.train.prepare import prepare

SLIDING, FULL = "sliding_attention", "full_attention"
LAYER = "model.layers.1"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.save_target(tmp_path / "target", "gemma4")


@pytest.fixture
def whole(directory: Path, tmp_path: Path) -> Path:
    return tiny.save_whole_gemma4(tmp_path / "whole", directory)


def publish(config: Values) -> None:
    """Google's directories give heads of full layers once for all."""
    own = config.pop("per_layer_config")
    assert {**own["1"]} == {"head_dim": 32, "num_key_value_heads": 1}
    config.update(global_head_dim=32, num_global_key_value_heads=1)


CONFIGS: list[tuple[str, Callable[[Values], object], str]] = [
    (
        "PLE",
        lambda c: c.update(hidden_size_per_layer_input=256),
        r"Gemma 4 E2B and E4B \(per-layer embeddings, shared keys and values\) are not supported",
    ),
    ("PLE by default", lambda c: c.pop("hidden_size_per_layer_input"), "Gemma 4 E2B and E4B"),
    ("shared KV", lambda c: c.update(num_kv_shared_layers=2), "Gemma 4 E2B and E4B"),
    ("experts", lambda c: c.update(enable_moe_block=True, num_experts=8), "lacks top_k_experts"),
    (
        "chosen",
        lambda c: c.update(tiny.GEMMA4_EXPERTS, top_k_experts=9),
        "it must be at most num_experts, 8",
    ),
    (
        "no experts",
        lambda c: c.update(tiny.GEMMA4_EXPERTS),
        r"missing tensors: model\.layers\.0\.experts\.down_proj, .* and \d+ more",
    ),
    (
        "bidirectional",
        lambda c: c.update(use_bidirectional_attention="all"),
        "bidirectional attention is not supported",
    ),
    (
        "bidirectional, as a switch",
        lambda c: c.update(use_bidirectional_attention=True),
        "bidirectional attention is not supported",
    ),
    (
        "activation",
        lambda c: c.update(hidden_activation="silu"),
        "hidden_activation silu is not supported, only gelu_pytorch_tanh",
    ),
    (
        "layers",
        lambda c: c.update(layer_types=[FULL] * 3 + ["linear_attention"]),
        "layers of type linear_attention are not supported",
    ),
    ("fewer", lambda c: c["layer_types"].pop(0), "layer_types names 3 of 4 layers"),
    ("window", lambda c: c.update(sliding_window=0), "sliding_window is 0; it must be at least 1"),
    (
        "heads",
        lambda c: c["per_layer_config"]["3"].update(num_key_value_heads=3),
        "4 attention heads cannot share 3 key-value heads evenly",
    ),
    (
        "own",
        lambda c: c["per_layer_config"]["3"].update(intermediate_size=3),
        "per_layer_config of intermediate_size is not supported",
    ),
    (
        "beyond",
        lambda c: c["per_layer_config"].update({"04": {"head_dim": 32}}),
        "per_layer_config names layer 4 of 4",
    ),
    ("rope", lambda c: c["rope_parameters"].pop(FULL), f"rope_parameters lack {FULL}"),
    (
        "cap",
        lambda c: c.update(final_logit_softcapping=0),
        "final_logit_softcapping is 0; it must be",
    ),
    ("hidden", lambda c: c.pop("hidden_size"), r"config\.json lacks hidden_size"),
    (
        "sizes",
        lambda c: c["per_layer_config"]["1"].update(head_dim=64),
        rf"{LAYER}\.self_attn\.o_proj\.weight has shape \[64, 128\], expected \[64, 256\]",
    ),
    (
        "values of their own",
        lambda c: c.update(attention_k_eq_v=False),
        rf"missing tensors: {LAYER}\.self_attn\.v_proj\.weight",
    ),
    (
        "quantized",
        lambda c: c.update(quantization_config={"quant_method": "bitsandbytes"}),
        "quant_method bitsandbytes is not supported",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [c[1:] for c in CONFIGS], ids=[c[0] for c in CONFIGS]
)
def test_what_cannot_be_run(directory: Path, change: Callable[[Values], object], message: str):
    change_config(directory, change)
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


WEIGHTS: list[tuple[str, Callable[[dict[str, Tensor]], object], str]] = [
    (
        "scalar",
        lambda t: t.pop(f"{LAYER}.layer_scalar"),
        rf"missing tensors: {LAYER}\.layer_scalar",
    ),
    (
        "scalars",
        lambda t: t.update({f"{LAYER}.layer_scalar": torch.ones(64)}),
        r"layer_scalar has shape \[64\], expected \[1\]",
    ),
    (
        "no number",
        lambda t: t[f"{LAYER}.layer_scalar"].fill_(torch.nan),
        rf"{LAYER}\.layer_scalar holds NaN",
    ),
    (
        "norm",
        lambda t: t.pop(f"{LAYER}.post_feedforward_layernorm.weight"),
        "missing tensors: .*post_feedforward_layernorm",
    ),
    (
        "other",
        lambda t: t.update({"model.vision_tower.x": torch.ones(1)}),
        r"unexpected tensors: model\.vision_tower\.x",
    ),
]


@pytest.mark.parametrize(
    ("change", "message"), [w[1:] for w in WEIGHTS], ids=[w[0] for w in WEIGHTS]
)
def test_weights_that_do_not_fit(directory: Path, change: Callable[..., object], message: str):
    assert_weights_are_refused(directory, change, message)


def test_published_keys(directory: Path, whole: Path):
    """Also where they are nested."""
    saved = read_spec(directory)
    assert read_spec(whole) == saved
    change_config(directory, publish)
    change_config(whole, lambda c: publish(c["text_config"]))
    assert read_spec(directory) == read_spec(whole) == saved
    assert [layer.attention.head_dim for layer in saved.layers] == [16, 32, 16, 32]
    assert [layer.attention.k_eq_v for layer in saved.layers] == [False, True] * 2


def test_kv_heads_of_full_layers_count_only_where_keys_are_values(directory: Path):
    change_config(directory, lambda c: publish(c) or c.update(attention_k_eq_v=False))
    heads = [layer.attention for layer in read_spec(directory).layers]
    assert [each.num_kv_heads for each in heads] == [2] * 4
    assert not any(each.k_eq_v for each in heads)


def test_numbers_of_layers_that_zeros_make_as_long_as_one_another(tmp_path: Path):
    """So does transformers 5 write them; every sixth layer is full where no types are given."""
    tiny.save_target(tmp_path, "gemma4", num_hidden_layers=12, layer_types=None)
    written = json.loads((tmp_path / "config.json").read_text())
    assert [*written["per_layer_config"]] == ["05", "11"]
    spec = read_spec(tmp_path)
    assert [i for i, layer in enumerate(spec.layers) if layer.attention.full] == [5, 11]
    change_config(tmp_path, lambda c: c.pop("layer_types"))
    assert read_spec(tmp_path) == spec


def test_towers_are_left_out_whole_or_in_parts(directory: Path, whole: Path):
    assert any("vision_tower" in name for name in load_file(whole / "model.safetensors"))
    check_decoder(whole)
    expected = dict(tiny.load_target(directory).named_parameters())
    found = dict(tiny.load_target(whole).named_parameters())
    parts = dict(load_ends(whole, torch.float32, tiny.CPU).named_parameters())
    for index, layer in enumerate(load_layers(whole, torch.float32, tiny.CPU)):
        parts |= {f"layers.{index}.{name}": value for name, value in layer.named_parameters()}
    assert found.keys() == parts.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value)
        assert torch.equal(parts[name], value)


def test_in_bfloat16_embeddings_are_scaled_by_a_rounded_number(tmp_path: Path):
    tiny.save_target(tmp_path, "gemma4", hidden_size=72)
    decoder, rows = tiny.load_target(tmp_path, torch.bfloat16), torch.arange(20)
    _, first = decoder(rows, rows, tiny.causal, (0,))
    factor = torch.tensor(72**0.5).bfloat16()
    assert torch.equal(first, decoder.embed.weight[:20] * factor)


def easy(directory: Path) -> Path:
    """A target whose next token depends mostly on the newest one."""
    tiny.save_target(directory, "gemma4", tie_word_embeddings=False)
    norms = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
    change_tensors(directory, lambda t: [t[n].mul_(0.02) for n in t if n.endswith(norms)])
    return directory


@pytest.mark.parametrize("method", ["peagle", *at_night(["eagle3"])])
def test_a_drafter_is_trained_for_it(recipe_for, tmp_path: Path, method: str):
    """With the first layer's heads, full and scaled as usual; it learns, and changes no text."""
    directory = easy(tmp_path / "target")
    target = tiny.load_target(directory)
    data = (str(tiny.save_answers(tmp_path / "answers.jsonl", target)),)
    recipe = recipe_for(tmp_path / "drafter", target=str(directory), data=data, method=method)
    prepare(recipe).run(lambda _: None)
    model = tiny.load_drafter(tmp_path / "drafter", target)
    attention = model.config.layer.attention
    assert (attention.head_dim, attention.num_kv_heads) == (16, 2)
    assert attention.full
    assert attention.scale is None
    how, prompts = SamplingParams(max_tokens=40), [[5, 6, 7], list(range(1, 30))]
    plain, drafted, captured = (
        tiny.run(tiny.engine(target, drafter, k, on, tiny.engine_config()), prompts, how)
        for drafter, k, on in (
            (None, 0, False),
            (drafter_for(model), 4, False),
            (drafter_for(model), 4, True),
        )
    )
    assert tiny.outputs(drafted) == tiny.outputs(captured) == tiny.outputs(plain)
    assert [each.speculation for each in captured] == [each.speculation for each in drafted]
    assert sum(request.speculation.accepted for request in drafted) > 20
    sampled = SamplingParams(max_tokens=40, temperature=1.0, seed=3)
    one, other = (
        tiny.run(tiny.engine(target, drafter, k, on, tiny.engine_config()), prompts, sampled)
        for drafter, k, on in ((None, 0, False), (drafter_for(model), 4, True))
    )
    assert tiny.outputs(one) == tiny.outputs(other) != tiny.outputs(plain)

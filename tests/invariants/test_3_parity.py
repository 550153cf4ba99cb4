"""Invariant 3: our decoders equal transformers' on random tiny configurations of each family."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from peagle.config import SamplingParams
from peagle.engine.engine import Engine
from peagle.models.loading import load_decoder

TOKENS = [(13 * i + i * i) % tiny.VOCAB for i in range(80)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with an attention factor": {**YARN, "attention_factor": 0.7},
    "yarn with betas, not truncated": {**YARN, "beta_fast": 8, "beta_slow": 2, "truncate": False},
}


MULTIPLIERS = "embedding_multiplier", "residual_multiplier"
WIDTHS = st.sampled_from([1, 2, 19, 200])
"""Windows shorter and longer than the tokens."""
LAYER_TYPES = st.sampled_from(["sliding_attention", "full_attention"])


def change_config(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Edit a target's config.json."""
    file = directory / "config.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def assert_parity(directory: Path, dtype: torch.dtype = torch.float32, atol: float = 1e-4) -> None:
    """Equal logits, and equal hidden states between any two layers."""
    decoder, peer = tiny.load_target(directory, dtype), tiny.load_peer(directory, dtype)
    layers = len(decoder.spec.layers)
    with torch.no_grad():
        wanted = peer(torch.tensor([TOKENS]), output_hidden_states=True)
    logits, tapped = tiny.run_target(decoder, TOKENS, tuple(range(layers)))
    assert tapped is not None
    torch.testing.assert_close(logits, wanted.logits[0], atol=atol, rtol=0)
    for layer, ours in enumerate(tapped.chunk(layers, dim=-1)):
        torch.testing.assert_close(ours, wanted.hidden_states[layer][0], atol=atol, rtol=1e-4)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    family = draw(st.sampled_from(list(tiny.KINDS)))
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    changes = {
        "family": family,
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "hidden_size": draw(st.sampled_from([36, 72])),
        "head_dim": draw(st.sampled_from([8, 16, 34])),
        "intermediate_size": draw(st.sampled_from([40, 96])),
        "tie_word_embeddings": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "rope_parameters": {
            **draw(st.sampled_from(list(ROPES.values()))),
            "rope_theta": draw(st.sampled_from([100.0, 10000.0, 5e5])),
        },
    }
    if family not in ("mistral", "ministral", "ministral3", "qwen2", "phi3"):
        changes["attention_bias"] = draw(st.booleans())
    if family in ("llama", "smollm3", "seed_oss", "granite"):
        changes["mlp_bias"] = draw(st.booleans())
    if family == "qwen3_moe":
        experts = draw(st.integers(1, 9))
        changes |= {
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "moe_intermediate_size": draw(st.sampled_from([8, 40])),
            "norm_topk_prob": draw(st.booleans()),
            "use_sliding_window": draw(st.booleans()),
            "sliding_window": draw(WIDTHS),
        }
    if family in ("gpt_oss", "qwen3_windows", "qwen2", "ministral", "smollm3"):
        layers = changes["num_hidden_layers"]
        changes["sliding_window"] = draw(WIDTHS)
        changes["layer_types"] = draw(st.lists(LAYER_TYPES, min_size=layers, max_size=layers))
    if family == "gpt_oss":
        changes |= draw(gpt_oss_changes())
    if family == "ministral3":
        growing = {"llama_4_scaling_beta": draw(st.sampled_from([0.0, 0.3]))}
        changes["rope_parameters"] |= {"original_max_position_embeddings": 32, **growing}
    if family in ("mistral", "ministral3", "phi3"):
        changes["sliding_window"] = draw(st.none() | WIDTHS)
    if family == "phi3":
        share = draw(st.sampled_from([0.5, 0.75, 1.0]))
        changes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        changes |= {"head_dim": 16, "partial_rotary_factor": share}
    if family.startswith(("qwen3_5", "qwen3_next")):
        both = ["linear_attention", "full_attention"]  # transformers' cache asks for one of each
        types = [*both, *draw(st.lists(st.sampled_from(both), max_size=2))]
        partly = {"rope_type": "default", "partial_rotary_factor": 0.25}
        changes |= {"layer_types": types, "num_hidden_layers": len(types)}
        changes |= {"head_dim": draw(st.sampled_from([8, 16, 32])), "attention_bias": False}
        changes["rope_parameters"] = {**partly, "rope_theta": draw(st.sampled_from([100.0, 1e4]))}
    if family == "smollm3":
        layers = changes["num_hidden_layers"]
        if not draw(st.booleans()):  # then windows are where nothing is rotated
            changes["layer_types"] = None
        changes["use_sliding_window"] = True
        changes["no_rope_layers"] = draw(
            st.none() | st.lists(st.integers(0, 1), min_size=layers, max_size=layers)
        )
    if family == "seed_oss":
        changes["attention_out_bias"] = draw(st.booleans())
    if family == "granite":
        changes |= {key: draw(st.sampled_from([0.5, 1.0, 3.0])) for key in MULTIPLIERS}
        changes["attention_multiplier"] = draw(st.sampled_from([0.1, 0.5, 1.0]))
        changes["logits_scaling"] = draw(st.sampled_from([1.0, 2.0, 5.0]))
    if family.startswith("gemma4"):
        changes |= draw(gemma4_changes(changes))
    if family == "gemma3":
        layers, rope = changes["num_hidden_layers"], changes["rope_parameters"]
        rope = {key: value for key, value in rope.items() if key != "truncate"}
        near = {"rope_type": "default", "rope_theta": 100.0}
        changes["rope_parameters"] = {"sliding_attention": near, "full_attention": rope}
        changes["layer_types"] = draw(st.lists(LAYER_TYPES, min_size=layers, max_size=layers))
        changes["sliding_window"] = draw(WIDTHS)
        changes["query_pre_attn_scalar"] = draw(st.sampled_from([8, 16, 40]))
        changes["final_logit_softcapping"] = draw(st.sampled_from([None, 2.0, 30.0]))
    if family == "muse_glimmer":
        layers = changes["num_hidden_layers"]
        changes |= {"attention_bias": False, "hidden_size": 72, "sliding_window": draw(WIDTHS)}
        changes["layer_types"] = draw(
            st.none() | st.lists(LAYER_TYPES, min_size=layers, max_size=layers)
        )
        changes["layer_rope_theta"] = draw(
            st.none() | st.lists(st.sampled_from([0, 1e4]), min_size=layers, max_size=layers)
        )
        for name in ("post_norm_eps", "qk_scale_factor", "output_multiplier"):
            changes[name] = draw(st.sampled_from([1e-2, 0.5, 2.0]))
    if family == "gemma4_moe":
        experts = draw(st.integers(1, 9))
        changes |= {"num_experts": experts, "top_k_experts": draw(st.integers(1, experts))}
    return changes


@st.composite
def gpt_oss_changes(draw: st.DrawFn) -> dict[str, Any]:
    """Limits that some activations reach."""
    experts = draw(st.integers(1, 9))
    return {
        "num_local_experts": experts,
        "num_experts_per_tok": draw(st.integers(1, experts)),
        "swiglu_limit": draw(st.sampled_from([0.5, 7.0])),
    }


@st.composite
def gemma4_changes(draw: st.DrawFn, sizes: dict[str, Any]) -> dict[str, Any]:
    """Full layers with heads of their own, values of their own or not, and a cap or none."""
    layers, heads = sizes["num_hidden_layers"], sizes["num_attention_heads"]
    kv_heads = [count for count in (1, 2, 3) if heads % count == 0]
    # of settings by layer type, transformers does not find `truncate`
    rope = {k: value for k, value in sizes["rope_parameters"].items() if k != "truncate"}
    turning = {"rope_type": "proportional", "rope_theta": draw(st.sampled_from([100.0, 1e6]))}
    turning["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.6, 1.0]))
    return {
        "sliding_window": draw(WIDTHS),
        "layer_types": draw(st.lists(LAYER_TYPES, min_size=layers, max_size=layers)),
        "global_head_dim": draw(st.sampled_from([8, 24])),
        "num_global_key_value_heads": draw(st.none() | st.sampled_from(kv_heads)),
        "attention_k_eq_v": draw(st.booleans()),
        "final_logit_softcapping": draw(st.sampled_from([None, 2.0, 30.0])),
        "rope_parameters": {
            "sliding_attention": rope,
            "full_attention": draw(st.sampled_from([turning, rope])),
        },
    }


@pytest.mark.slow
@settings(max_examples=150)
@given(configs())
def test_random_configurations(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]):
    assert_parity(tiny.save_target(tmp_path_factory.mktemp("target"), **changes))


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss", "smollm3"])
@pytest.mark.parametrize("name", ROPES)
def test_every_rope_of_every_family(tmp_path: Path, family: str, name: str):
    rope = {**ROPES[name], "rope_theta": 10000.0}
    assert_parity(tiny.save_target(tmp_path, family, rope_parameters=rope))


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("name", ROPES)
def test_rope_scaling_beside_rope_parameters_replaces_them(tmp_path: Path, family: str, name: str):
    """As model cards say to add it, to a configuration that transformers 5 has written."""
    tiny.save_target(tmp_path, family)
    own = json.loads((tmp_path / "config.json").read_text())["rope_parameters"]
    own = {"rope_type": "yarn", "factor": 9.0, "rope_theta": own["rope_theta"]}
    change_config(tmp_path, lambda c: c.update(rope_parameters=own, rope_scaling=ROPES[name]))
    assert_parity(tmp_path)


@pytest.mark.parametrize("base", [None, 2000.0])
def test_a_base_that_rope_scaling_hides_is_gone_and_said(tmp_path: Path, base: float | None):
    tiny.save_target(tmp_path)
    own, beside = (
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_theta": base} if base else {},
    )
    change_config(tmp_path, lambda c: c.update(rope_parameters=own, rope_scaling=YARN, **beside))
    said = f"rope_theta 500: here and in transformers it is {base or 10_000:g}; give rope_scaling"
    with pytest.warns(UserWarning, match=said):
        assert_parity(tmp_path)


def test_gemma4_within_its_towers(targets, tmp_path: Path):
    assert_parity(tiny.save_whole_gemma4(tmp_path, targets["gemma4"].directory))


def test_gemma4_12b_beside_what_reads_images_and_sounds(targets, tmp_path: Path):
    assert_parity(tiny.save_whole_gemma4_unified(tmp_path, targets["gemma4_unified"].directory))


def test_gemma3_within_its_tower(targets, tmp_path: Path):
    assert_parity(tiny.save_whole_gemma3(tmp_path, targets["gemma3"].directory))


def test_gemma3_as_it_is_published(tmp_path: Path):
    """Two bases beside each other, a scaling of the full layers' alone, and every sixth is full."""
    tiny.save_target(tmp_path, "gemma3", num_hidden_layers=7, layer_types=None)
    keys = {"rope_theta": 5e4, "rope_local_base_freq": 200.0, "sliding_window_pattern": 6}
    scaling = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    change_config(tmp_path, lambda c: [c.pop(k) for k in ("layer_types", "rope_parameters")])
    change_config(tmp_path, lambda c: c.update(keys, **scaling))
    spec = tiny.load_target(tmp_path).spec
    assert [layer.attention.window for layer in spec.layers] == [7, 7, 7, 7, 7, None, 7]
    assert spec.max_length == 256
    assert_parity(tmp_path)


@pytest.mark.parametrize("kind", ["mistral", "ministral3"])
@pytest.mark.parametrize("tied", [False, True])
def test_mistral_3_within_its_tower(targets, tmp_path: Path, kind: str, tied: bool):
    assert_parity(tiny.save_whole_mistral3(tmp_path, targets[kind].directory, tied))


@pytest.mark.parametrize("family", ["mistral", "qwen3_5"])
def test_a_language_model_under_the_names_of_newer_writers(targets, tmp_path: Path, family: str):
    """Which transformers reads as it does the published ones; a tower is left out then, too."""
    if family == "mistral":
        tiny.save_whole_mistral3(tmp_path, targets[family].directory, tied=False)
    else:
        tiny.save_target(tmp_path, family)
    tensors, named = load_file(tmp_path / "model.safetensors"), {}
    for name, tensor in tensors.items():
        inner = name.removeprefix("language_model.")
        tower = name.startswith(("vision_tower.", "multi_modal_projector."))
        inner = inner.replace("model.", "model.language_model.", 1)
        named[f"model.{name}" if tower else inner] = tensor
    assert not named.keys() & tensors.keys() - {"lm_head.weight"}
    save_file(named, tmp_path / "model.safetensors", {"format": "pt"})
    assert_parity(tmp_path)


@pytest.mark.parametrize(
    ("family", "left_out"),
    [
        ("muse_glimmer", ("layer_types", "layer_rope_theta")),
        ("gpt_oss", ("layer_types",)),
        ("qwen3", ("head_dim",)),
    ],
)
def test_what_a_configuration_does_not_say(tmp_path: Path, family: str, left_out: tuple[str, ...]):
    """It is what transformers takes then."""
    sizes = {"head_dim": 128} if family == "qwen3" else {"layer_types": None}
    tiny.save_target(tmp_path, family, **sizes)

    def change(values: dict[str, Any]) -> None:
        inner = values.get("text_config", values)
        for name in left_out:
            del inner[name]

    change_config(tmp_path, change)
    assert_parity(tmp_path)


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 2.0, 5.0, 9.0, 20.0, 60.0],
}


@pytest.mark.parametrize("changes", [{}, {"attention_factor": 1.3}, {"factor": 3.0}])
@pytest.mark.parametrize("tokens", [30, 80])
def test_longrope_by_the_length_of_the_longest_context(
    tmp_path: Path, changes: dict[str, Any], tokens: int
):
    """transformers goes by the tokens that there are, and vLLM by those that there may be."""
    given = {"rope_parameters": {**LONGROPE, "rope_theta": 1e4, **changes}}
    tiny.save_target(tmp_path, "phi3", original_max_position_embeddings=32, **given)
    decoder = load_decoder(tmp_path, torch.float32, tiny.CPU, 32 if tokens <= 32 else None)
    wanted = tiny.peer_logits(tiny.load_peer(tmp_path), TOKENS[:tokens])
    found, _ = tiny.run_target(decoder, TOKENS[:tokens])
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_gpt_oss_that_says_nothing_of_rotation(tmp_path: Path):
    tiny.save_target(tmp_path, "gpt_oss")
    change_config(tmp_path, lambda c: c.pop("rope_parameters"))
    assert_parity(tmp_path)
    assert tiny.load_target(tmp_path).max_length == 32 * 4096


@pytest.mark.parametrize("count", [0, 2, 4])
def test_windows_from_a_layer_on(tmp_path: Path, count: int):
    """Published configurations of Qwen3 have no `layer_types`."""
    tiny.save_target(tmp_path, "qwen3_windows")
    change_config(tmp_path, lambda c: c.pop("layer_types") and c.update(max_window_layers=count))
    windows = [layer.attention.window for layer in tiny.load_target(tmp_path).spec.layers]
    assert windows == [None] * count + [7] * (4 - count)
    assert_parity(tmp_path)


@pytest.mark.sweep
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings("ignore:.* hold another head")
def test_a_head_of_its_own_in_files_whose_configuration_ties_it(
    tmp_path: Path, family: str, dtype: torch.dtype
):
    tiny.save_target(tmp_path, family, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embeddings = tensors["model.embed_tokens.weight"]
    head = (0.15 * torch.randn_like(embeddings)).to(dtype)
    for own in (embeddings.clone(), head):
        tensors["lm_head.weight"] = own
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
        assert_parity(tmp_path)


def test_a_head_dim_that_the_configuration_leaves_out(tmp_path: Path):
    tiny.save_target(tmp_path, "llama", head_dim=None)
    change_config(tmp_path, lambda c: c.pop("head_dim"))
    assert_parity(tmp_path)


@pytest.mark.parametrize("name", ["default", "llama3", "yarn"])
def test_rope_keys_of_older_configurations(tmp_path: Path, name: str):
    """Published directories say `rope_theta` and `rope_scaling`, the type under either name."""
    rope = {**ROPES[name], "rope_theta": 1000.0}
    tiny.save_target(tmp_path, rope_parameters=rope)
    wanted, _ = tiny.run_target(tiny.load_target(tmp_path), TOKENS)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if name == "default" else {**rope, "type": kind}
    (tmp_path / "config.json").write_text(json.dumps(config))
    logits, _ = tiny.run_target(tiny.load_target(tmp_path), TOKENS)
    torch.testing.assert_close(logits, wanted, atol=0, rtol=0)
    assert_parity(tmp_path)


def test_sharded_weights(tmp_path: Path):
    tiny.save_target(tmp_path / "whole")
    tiny.load_peer(tmp_path / "whole").save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    assert_parity(tmp_path / "parts")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_weights(tmp_path: Path, dtype: torch.dtype):
    tiny.save_target(tmp_path / "whole")
    tiny.load_peer(tmp_path / "whole", torch.bfloat16).save_pretrained(tmp_path / "half")
    assert_parity(tmp_path / "half", dtype, atol=1e-4 if dtype == torch.float32 else 0.3)


def test_experts_in_mxfp4(tmp_path: Path):
    """Read by us, and by transformers after its own function has made them plain."""
    tiny.pack_experts(tiny.save_target(tmp_path / "packed", "gpt_oss"))
    plain = tiny.save_target(tmp_path / "plain", "gpt_oss")
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_blocks")]:
        scales = tensors.pop(name.replace("_blocks", "_scales"))
        weight = convert_moe_packed_tensors(tensors.pop(name), scales, dtype=torch.float32)
        tensors[name.removesuffix("_blocks")] = weight
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    assert_parity(plain)
    ours, theirs = (tiny.load_target(tmp_path / name) for name in ("packed", "plain"))
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(one.mlp.gate_up.dense(), other.mlp.gate_up)
        assert torch.equal(one.mlp.down.dense(), other.mlp.down)
    found, wanted = (tiny.run_target(target, TOKENS)[0] for target in (ours, theirs))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize("family", tiny.KINDS)
@pytest.mark.parametrize("budget", [7, 2048])
def test_the_paged_engine_computes_the_same(targets, family: str, budget: int):
    """Log-probabilities through paged attention, in chunks or not, batched or not."""
    config = tiny.engine_config(max_num_batched_tokens=budget, block_size=4)
    prompts = [TOKENS[:1], TOKENS[5:40], TOKENS[20:37], TOKENS[40:57]]
    how = SamplingParams(max_tokens=5, logprobs=3)
    requests = tiny.run(Engine(targets[family].decoder, None, 0, config), prompts, how)
    for request in requests:
        scores = tiny.peer_logits(targets[family].peer, request.tokens).log_softmax(dim=-1)
        for place, found in enumerate(request.logprobs, start=request.prompt_length):
            wanted = scores[place - 1]
            assert found.chosen == pytest.approx(wanted[request.tokens[place]].item(), abs=1e-4)
            assert [token for token, _ in found.top] == wanted.topk(3).indices.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("family", tiny.KINDS)
def test_16_bits_are_as_near_float32_as_in_transformers(
    tmp_path: Path, family: str, dtype: torch.dtype
):
    directory = tiny.save_target(tmp_path / "target", family, layer_std=0.03)
    exact, _ = tiny.run_target(tiny.load_target(directory), TOKENS)
    ours, _ = tiny.run_target(tiny.load_target(directory, dtype), TOKENS)
    peer = tiny.peer_logits(tiny.load_peer(directory, dtype), TOKENS)
    found, theirs = (float((one.float() - exact).abs().median()) for one in (ours, peer))
    assert found <= 1.3 * theirs

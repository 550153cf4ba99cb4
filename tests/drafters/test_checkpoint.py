"""A drafter's directory: vLLM's layouts are read, ours is written, all else is reported."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from peagle.drafters.checkpoint import save_drafter
from peagle.drafters.config_file import read_drafter_config
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.kind import EAGLE3, PEAGLE
from peagle.drafters.model import DraftModel, default_taps
from peagle.drafters.vocabulary import membership
from peagle.errors import InputError
from peagle.models.spec import MLPSpec
from peagle.ops.rope import RopeConfig

Tensors = dict[str, torch.Tensor]
Values = dict[str, Any]


def written(directory: Path, parallel: bool = True, **changes: Any) -> Path:
    return tiny.save_random_drafter(directory, tiny.drafter_config(parallel, **changes))


def read(directory: Path) -> tuple[Values, Tensors]:
    values = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return values, load_file(directory / "model.safetensors")


def write(directory: Path, values: Values, tensors: Tensors) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory


def assert_same(ours: DraftModel, other: DraftModel) -> None:
    """The same parameters, bit for bit, and the same map of the vocabulary."""
    expected = dict(other.named_parameters())
    assert dict(ours.named_parameters()).keys() == expected.keys()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, expected[name]), name
    assert torch.equal(ours.readout.d2t, other.readout.d2t)


GEGLU = MLPSpec(96, activation="gelu_tanh")
ROUND_TRIPS: dict[str, Values] = {
    "plain": {},
    "EAGLE-3": {"parallel": False},
    "Llama-style": {"qk_norm": False},
    "one layer": {"layers": 1},
    "reduced vocabulary": {"draft_vocab": 30},
    "every norm": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "two taps": {"taps": (0, 4)},
    "five taps": {"taps": (0, 1, 2, 3, 4)},
    "windows": {"windows": (8, 8)},
    "windowed and full layers of Llama's style": {"windows": (None, 8), "qk_norm": False},
    "GeGLU": {"layer": replace(tiny.DRAFT_LAYER, feed_forward=GEGLU)},
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_what_is_written_is_read_bit_for_bit(target, tmp_path: Path, name: str):
    config = tiny.drafter_config(**{"parallel": True, **ROUND_TRIPS[name]})
    model = tiny.random_drafter(config)
    save_drafter(tmp_path / "drafter", model, torch.float32)
    loaded = tiny.load_drafter(tmp_path / "drafter", target.decoder)
    assert loaded.config == config
    assert_same(loaded, model)


def test_bfloat16_is_the_default_and_rounds_once(target, tmp_path: Path):
    model = tiny.random_drafter(tiny.drafter_config(parallel=True))
    save_drafter(tmp_path / "drafter", model)
    _, tensors = read(tmp_path / "drafter")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert_same(tiny.load_drafter(tmp_path / "drafter", target.decoder), model.bfloat16().float())


ROPES = [
    RopeConfig(theta=500.0),
    RopeConfig(kind="linear", factor=2.0, original_max_position=256),
    RopeConfig(kind="llama3", factor=8.0, original_max_position=64, high_freq_factor=3.0),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=64, beta_fast=16, truncate=False),
    RopeConfig(kind="yarn", factor=4.0, original_max_position=64, attention_factor=0.9),
    RopeConfig(
        kind="longrope",
        factor=4.0,
        original_max_position=64,
        short_factor=(1.0,) * (tiny.ATTENTION.head_dim // 2),
        long_factor=(2.0,) * (tiny.ATTENTION.head_dim // 2),
    ),
]


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope.kind)
def test_the_rope_survives(target, tmp_path: Path, rope: RopeConfig):
    layer = replace(tiny.DRAFT_LAYER, mixer=replace(tiny.ATTENTION, rope=rope))
    model = tiny.random_drafter(tiny.drafter_config(parallel=True, layer=layer))
    save_drafter(tmp_path / "drafter", model, torch.float32)
    loaded = tiny.load_drafter(tmp_path / "drafter", target.decoder)
    torch.testing.assert_close(loaded.rotations, model.rotations, atol=0, rtol=0)


def test_what_vllm_needs_is_written(tmp_path: Path):
    """The layout that vLLM reads."""
    values, tensors = read(written(tmp_path / "drafter", draft_vocab=30))
    assert values["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert values["pard_token"] == values["ptd_token_id"] == tiny.MASK
    assert values["eagle_aux_hidden_state_layer_ids"] == list(tiny.TAPS)
    assert values["num_aux_hidden_states"] == 3
    assert (values["vocab_size"], values["draft_vocab_size"]) == (tiny.VOCAB, 30)
    assert "speculators_config" not in values
    assert not any(name.startswith("model.") for name in tensors)
    assert tensors["mask_hidden"].shape == (1, 3 * 64)
    assert tensors["d2t"].dtype == torch.int64
    ids = torch.arange(30) + tensors["d2t"]
    assert torch.equal(tensors["t2d"].nonzero().flatten(), ids)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64)


def test_a_full_vocabulary_and_eagle3_need_less(tmp_path: Path):
    values, tensors = read(written(tmp_path / "drafter", parallel=False, qk_norm=False))
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert not {"d2t", "t2d", "mask_hidden"} & tensors.keys()
    assert not {"pard_token", "ptd_token_id"} & values.keys()


def test_writing_replaces_the_directory_whole(tmp_path: Path):
    written(tmp_path / "drafter")
    (tmp_path / "drafter" / "left-over").touch()
    written(tmp_path / "drafter")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["drafter"]
    files = sorted(p.name for p in (tmp_path / "drafter").iterdir())
    assert files == ["config.json", "model.safetensors"]
    modes = {path.stat().st_mode for path in (tmp_path / "drafter").iterdir()}
    assert len(modes) == 1, "who may read one file may read both"


def test_fused_projections_and_rotary_tables_of_old_files(target, tmp_path: Path):
    model = tiny.random_drafter(tiny.drafter_config(parallel=True))
    save_drafter(tmp_path / "ours", model, torch.float32)
    values, tensors = read(tmp_path / "ours")
    for part, parts in (("self_attn.{}_proj", "q k v"), ("mlp.{}_proj", "gate up")):
        fused = part.format("qkv" if parts == "q k v" else "gate_up")
        for layer in ("layers.0", "layers.1"):
            names = [f"{layer}.{part.format(one)}.weight" for one in parts.split()]
            tensors[f"{layer}.{fused}.weight"] = torch.cat([tensors.pop(name) for name in names])
            tensors[f"{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    raw = write(tmp_path / "raw", values, tensors)
    assert_same(tiny.load_drafter(raw, target.decoder), model)
    assert diagnose(raw).problems == ()


def test_the_usual_layers_are_tapped_by_default():
    assert default_taps(36) == (2, 18, 33)


def test_midlayer_names_and_another_shape_of_mask_hidden(target, tmp_path: Path):
    model = tiny.random_drafter(tiny.drafter_config(parallel=True))
    save_drafter(tmp_path / "ours", model, torch.float32)
    values, tensors = read(tmp_path / "ours")
    raw = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    raw["mask_hidden"] = raw["mask_hidden"].view(1, 1, -1)
    assert_same(tiny.load_drafter(write(tmp_path / "raw", values, raw), target.decoder), model)


@pytest.mark.parametrize(
    "keys",
    [{"ptd_token_id": 7}, {"pard_token": 7}, {"mask_token_id": 7, "pard_token": 3}],
    ids=str,
)
def test_the_first_mask_token_key_wins(target, tmp_path: Path, keys: Values):
    values, tensors = read(written(tmp_path / "ours"))
    bare = {k: v for k, v in values.items() if k not in ("pard_token", "ptd_token_id")}
    raw = write(tmp_path / "raw", {**bare, **keys}, tensors)
    assert tiny.load_drafter(raw, target.decoder).config.mask_token_id == 7


def test_embeddings_and_head_that_are_left_out_are_the_targets(target, tmp_path: Path):
    values, tensors = read(written(tmp_path / "ours"))
    less = {k: v for k, v in tensors.items() if k not in ("embed_tokens.weight", "lm_head.weight")}
    model = tiny.load_drafter(write(tmp_path / "less", values, less), target.decoder)
    assert model.embed is target.decoder.embed
    assert model.readout.head is target.decoder.head


def test_an_identity_map_of_the_full_vocabulary_is_accepted(target, tmp_path: Path):
    """Amazon's published head carries one."""
    values, tensors = read(written(tmp_path / "ours"))
    tensors |= {
        "d2t": torch.zeros(tiny.VOCAB, dtype=torch.int64),
        "t2d": torch.ones(tiny.VOCAB, dtype=torch.bool),
    }
    model = tiny.load_drafter(write(tmp_path / "raw", values, tensors), target.decoder)
    assert model.readout.vocabulary[:5].tolist() == [0, 1, 2, 3, 4]


def test_a_map_that_moves_ids_of_the_full_vocabulary_is_not(target, tmp_path: Path):
    values, tensors = read(written(tmp_path / "ours"))
    tensors["d2t"] = torch.ones(tiny.VOCAB, dtype=torch.int64)
    with pytest.raises(InputError, match=r"d2t maps draft ids although .* is the full one"):
        tiny.load_drafter(write(tmp_path / "raw", values, tensors), target.decoder)


def speculators_config(values: Values, algorithm: str) -> Values:
    """`config.json` as the speculators library writes it."""
    outer = ("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    inner = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "model_type")
    inner += ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps")
    inner += ("hidden_act", "max_position_embeddings", "rope_theta", "attention_bias", "mlp_bias")
    names = {"peagle": "PEagleSpeculator", "eagle3": "Eagle3Speculator"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 6}
    return {
        "speculators_model_type": algorithm,
        "speculators_version": "0.5.0",
        "architectures": [names[algorithm]],
        "transformer_layer_config": {key: values[key] for key in inner},
        **{key: values[key] for key in outer},
        **({"mask_token_id": tiny.MASK} if algorithm == "peagle" else {}),
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
    }


@pytest.mark.parametrize(
    ("algorithm", "said", "residual"),
    [
        ("eagle3", None, True),
        ("peagle", None, False),
        ("eagle3", False, False),
        ("peagle", True, True),
    ],
)
@pytest.mark.parametrize("qk_norm", [True, False])
def test_speculators_directories(
    target, tmp_path: Path, algorithm: str, said: bool | None, residual: bool, qk_norm: bool
):
    changes = {"qk_norm": qk_norm, "draft_vocab": 30, "norm_before_residual": residual}
    parallel = algorithm == "peagle"
    config = tiny.drafter_config(parallel, trained_tokens=6, **changes)
    model = tiny.random_drafter(config)
    save_drafter(tmp_path / "ours", model, torch.float32)
    values, tensors = read(tmp_path / "ours")
    foreign = speculators_config(values, algorithm)
    if said is not None:
        foreign["norm_before_residual"] = said
    loaded = tiny.load_drafter(write(tmp_path / "foreign", foreign, tensors), target.decoder)
    assert loaded.config == config
    assert_same(loaded, model)


Break = Callable[[Values, Tensors], object]

BROKEN: list[tuple[str, bool, Break, str]] = [
    ("tensors", True, lambda c, t: t.pop("fc.weight"), r"missing tensors: fc\.weight"),
    (
        "two missing",
        True,
        lambda c, t: (t.pop("norm.weight"), t.pop("layers.1.mlp.up_proj.weight")),
        r"missing tensors: layers\.1\.mlp\.up_proj\.weight, norm\.weight",
    ),
    (
        "unexpected",
        True,
        lambda c, t: t.update({"layers.2.mlp.up_proj.weight": torch.ones(2)}),
        r"unexpected tensors: layers\.2\.mlp\.up_proj\.weight",
    ),
    (
        "misshapen",
        True,
        lambda c, t: t.update({"fc.weight": torch.ones(64, 64)}),
        "lists 3 aux layers, and its fc reads 1; name those of its training",
    ),
    (
        "misshapen part",
        True,
        lambda c, t: t.update({"layers.0.self_attn.k_proj.weight": torch.ones(32, 64)}),
        r"layers\.0\.self_attn\.k_proj\.weight has shape \[32, 64\], expected \[32, 128\]",
    ),
    (
        "mask_hidden too short",
        True,
        lambda c, t: t.update({"mask_hidden": torch.ones(1, 64)}),
        r"mask_hidden has shape \[64\], expected \[192\]",
    ),
    (
        "head of another size",
        True,
        lambda c, t: c.update({"draft_vocab_size": 30}),
        r"lm_head\.weight has shape \[96, 64\], expected \[30, 64\]",
    ),
    (
        "no mask id",
        True,
        lambda c, t: (c.pop("pard_token"), c.pop("ptd_token_id")),
        "without a mask token id",
    ),
    (
        "mask id too large",
        True,
        lambda c, t: c.update({"pard_token": 96, "ptd_token_id": 96}),
        "mask token id 96 is outside the vocabulary of 96",
    ),
    (
        "aux layers",
        True,
        lambda c, t: c.update({"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}),
        r"aux layers \[1, 2, 5\] are not all within the target's 0 to 4",
    ),
    (
        "aux layers twice",
        True,
        lambda c, t: c.update({"eagle_aux_hidden_state_layer_ids": [1, 2, 2]}),
        r"aux layers \[1, 2, 2\] repeat",
    ),
    (
        "hidden size",
        True,
        lambda c, t: c.update({"target_hidden_size": 32}),
        "features of width 32, the target's hidden size is 64",
    ),
    (
        "vocabulary",
        True,
        lambda c, t: c.update({"vocab_size": 95}),
        "vocabulary has 95 tokens, the target's 96",
    ),
    (
        "architecture",
        True,
        lambda c, t: c.update({"architectures": ["MedusaModel"]}),
        "architecture MedusaModel is not an EAGLE-3 or P-EAGLE drafter",
    ),
    (
        "EAGLE-1",
        True,
        lambda c, t: c.update({"eagle_config": {"use_aux_hidden_state": False}}),
        "EAGLE-1",
    ),
    ("a key", True, lambda c, t: c.pop("hidden_size"), "config.json lacks hidden_size"),
    ("a kind", True, lambda c, t: c.update({"hidden_size": "x"}), "a value of the wrong kind"),
    (
        "a kind of ours",
        True,
        lambda c, t: c.update({"draft_vocab_size": "many"}),
        "a value of the wrong kind",
    ),
    (
        "a list of words",
        True,
        lambda c, t: c.update({"eagle_aux_hidden_state_layer_ids": ["low"]}),
        "a value of the wrong kind",
    ),
    (
        "no list",
        True,
        lambda c, t: c.update({"architectures": {"a": 1}}),
        "architecture none is not",
    ),
    (
        "no object",
        True,
        lambda c, t: c.update({"transformer_layer_config": [1]}),
        "a value of the wrong kind",
    ),
    (
        "NaN",
        True,
        lambda c, t: t["norm.weight"].fill_(float("nan")),
        r"norm\.weight holds NaN or infinite values",
    ),
    (
        "infinity",
        False,
        lambda c, t: t["fc.weight"].view(-1)[5:6].fill_(float("inf")),
        r"fc\.weight holds NaN or infinite values",
    ),
]


@pytest.mark.parametrize(
    ("parallel", "damage", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_what_is_wrong_is_named(
    target, tmp_path: Path, parallel: bool, damage: Break, message: str
):
    values, tensors = read(written(tmp_path / "ours", parallel))
    damage(values, tensors)
    broken = write(tmp_path / "broken", values, tensors)
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_drafter(broken, target.decoder)
    assert "\n" not in str(caught.value)
    assert str(broken) in str(caught.value)


MAPS: list[tuple[str, torch.Tensor | None, str]] = [
    ("missing", None, "needs the tensor d2t, which is missing"),
    ("ids instead of offsets", torch.arange(60, 90), "offsets, not ids"),
    ("below zero", torch.full((30,), -1), "offsets, not ids"),
    ("too short", torch.zeros(29, dtype=torch.int64), "does not map every draft id"),
    ("misshapen", torch.zeros(2, 15, dtype=torch.int64), "does not map every draft id"),
]


@pytest.mark.parametrize(("d2t", "message"), [m[1:] for m in MAPS], ids=[m[0] for m in MAPS])
def test_maps_of_the_vocabulary(target, tmp_path: Path, d2t: torch.Tensor | None, message: str):
    values, tensors = read(written(tmp_path / "ours", draft_vocab=30))
    tensors.pop("d2t")
    if d2t is not None:
        tensors["d2t"] = d2t
    with pytest.raises(InputError, match=message):
        tiny.load_drafter(write(tmp_path / "raw", values, tensors), target.decoder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_offsets_of_either_width(target, tmp_path: Path, dtype: torch.dtype):
    values, tensors = read(written(tmp_path / "ours", draft_vocab=30))
    tensors["d2t"] = torch.arange(30).to(dtype)
    tensors["t2d"] = membership(torch.arange(0, 60, 2), tiny.VOCAB)
    model = tiny.load_drafter(write(tmp_path / "raw", values, tensors), target.decoder)
    assert model.readout.vocabulary[:30].tolist() == list(range(0, 60, 2))


def test_each_method_is_told_from_the_other(target, tmp_path: Path):
    peagle, eagle3 = written(tmp_path / "peagle"), written(tmp_path / "eagle3", parallel=False)
    with pytest.raises(InputError, match="is P-EAGLE, not EAGLE-3; set parallel_drafting to true"):
        tiny.load_drafter(peagle, target.decoder, EAGLE3)
    with pytest.raises(InputError, match="is EAGLE-3, not P-EAGLE; set parallel_drafting to fal"):
        tiny.load_drafter(eagle3, target.decoder, PEAGLE)
    assert tiny.load_drafter(peagle, target.decoder, PEAGLE).config.kind is PEAGLE
    assert tiny.load_drafter(eagle3, target.decoder, EAGLE3).config.kind is EAGLE3


def test_every_problem_is_named_at_once(target, tmp_path: Path):
    values, tensors = read(written(tmp_path / "ours"))
    values |= {"vocab_size": 95, "target_hidden_size": 32, "pard_token": 99}
    with pytest.raises(InputError, match=r"width 32.*95 tokens.*mask token id 99"):
        tiny.load_drafter(write(tmp_path / "raw", values, tensors), target.decoder)


def test_a_truncated_file(target, tmp_path: Path):
    file = written(tmp_path / "drafter") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"model\.safetensors is damaged or cut short"):
        tiny.load_drafter(tmp_path / "drafter", target.decoder)


def test_pickle_files_are_never_loaded(target, tmp_path: Path):
    directory = written(tmp_path / "drafter")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"no \.safetensors file \(pickle files are never loaded"):
        tiny.load_drafter(directory, target.decoder)


def test_no_config(target, tmp_path: Path):
    with pytest.raises(InputError, match=r"not a model directory: it has no config\.json"):
        read_drafter_config(tmp_path, target.decoder.spec)


def test_a_nemo_checkpoint_is_read_by_its_architecture(target, tmp_path: Path):
    """All but the head and the mask slots' feature lie below `model`, and the type is the
    target's."""
    values, tensors = read(written(tmp_path / "ours", qk_norm=False))
    above = ("lm_head.weight", "mask_hidden")
    theirs = {n if n in above else f"model.{n}": tensors[n] for n in tensors}
    values |= {"architectures": ["LlamaEagle3DraftModel"], "model_type": "qwen3"}
    directory = write(tmp_path / "nemo", values, theirs)
    model = tiny.load_drafter(directory, target.decoder)
    assert_same(model, tiny.load_drafter(tmp_path / "ours", target.decoder))
    assert model.config.kind is PEAGLE
    assert diagnose(directory, target.directory).problems == ()


@pytest.mark.parametrize("architecture", ["LlamaEagle3DraftModel", "LlamaForCausalLMEagle3"])
def test_an_eagle3_head_of_nemo_has_one_layer(target, tmp_path: Path, architecture: str):
    """Its configuration keeps its target's depth and layer types, also as exported for vLLM."""
    values, tensors = read(written(tmp_path / "ours", parallel=False, qk_norm=False, layers=1))
    theirs = {"architectures": [architecture], "parallel_drafting": False, "num_hidden_layers": 4}
    values |= theirs | {"layer_types": ["full_attention"] * 4}
    directory = write(tmp_path / "nemo", values, tensors)
    model = tiny.load_drafter(directory, target.decoder)
    assert_same(model, tiny.load_drafter(tmp_path / "ours", target.decoder))
    assert diagnose(directory, target.directory).problems == ()


@pytest.mark.parametrize("nested", [False, True])
def test_angelslims_key_names_the_layers_before_the_taps(target, tmp_path: Path, nested: bool):
    values, tensors = read(written(tmp_path / "ours"))
    taps = values.pop("eagle_aux_hidden_state_layer_ids")
    said = {"aux_hidden_states_layer_ids": [tap - 1 for tap in taps]}
    values |= {"eagle_config": said} if nested else said
    config = tiny.load_drafter(write(tmp_path / "theirs", values, tensors), target.decoder).config
    assert (list(config.taps), config.taps_named) == (taps, True)


def test_taps_that_no_key_names_are_said(target, tmp_path: Path):
    values, tensors = read(written(tmp_path / "ours", taps=(1, 2)))
    del values["eagle_aux_hidden_state_layer_ids"], values["num_aux_hidden_states"]
    with pytest.warns(UserWarning, match=r"names no aux layers, so \[1, 2\] are taken, vLLM's"):
        tiny.load_drafter(write(tmp_path / "theirs", values, tensors), target.decoder)


SIGNS = {
    "a mask token": {"pard_token": tiny.MASK},
    "speculators' mask token": {"mask_token_id": tiny.MASK},
    "parallel drafting with a mask token": {"parallel_drafting": True, "ptd_token_id": tiny.MASK},
}


@pytest.mark.parametrize("sign", SIGNS)
def test_any_sign_of_p_eagle_asks_for_its_mask_hidden(target, tmp_path: Path, sign: str):
    values, tensors = read(written(tmp_path / "ours", parallel=False))
    directory = write(tmp_path / "theirs", values | SIGNS[sign], tensors)
    with pytest.raises(InputError, match="a P-EAGLE drafter, and its files have no mask_hidden"):
        tiny.load_drafter(directory, target.decoder)
    [problem] = diagnose(directory, target.directory).problems
    assert "no mask_hidden; export it again" in problem


def test_parallel_drafting_asks_for_a_mask_token(target, tmp_path: Path):
    values, tensors = read(written(tmp_path / "ours", parallel=False))
    directory = write(tmp_path / "theirs", {**values, "parallel_drafting": True}, tensors)
    with pytest.raises(InputError, match="a P-EAGLE drafter without a mask token id; set pard_t"):
        tiny.load_drafter(directory, target.decoder)


SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 16}
WINDOWS: list[tuple[str, Values, tuple[int | None, ...]]] = [
    ("llama", SLIDING, (None, 16)),
    ("llama", SLIDING | {"use_sliding_window": False}, (None, 16)),
    ("qwen3", SLIDING | {"use_sliding_window": True}, (None, 16)),
    ("qwen3", SLIDING, (None, None)),
    (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
        (None, 16),
    ),
    ("speculators", SLIDING, (None, 16)),
    ("speculators", SLIDING | {"sliding_window": None}, (None, None)),
    ("speculators", {"sliding_window": 2048}, (None, None)),
    ("llama", {"sliding_window": 2048, "use_sliding_window": True}, (None, None)),
    ("llama", SLIDING | {"sliding_window": 0}, (None, None)),
]


@pytest.mark.parametrize(("layout", "said", "widths"), WINDOWS)
def test_windows_are_those_that_vllm_reads(
    target, tmp_path: Path, layout: str, said: Values, widths: tuple[int | None, ...]
):
    """It reads Qwen3's own layout through transformers, which heeds `use_sliding_window`."""
    values, tensors = read(written(tmp_path / "ours", qk_norm=layout != "llama"))
    if layout == "speculators":
        values = speculators_config(values, "peagle")
        values["transformer_layer_config"] |= said
    else:
        values |= said
    directory = write(tmp_path / "theirs", values, tensors)
    layers = tiny.load_drafter(directory, target.decoder).config.transformer.layers
    assert tuple(layer.attention.window for layer in layers) == widths


@pytest.mark.parametrize("off", [{"sliding_window": None}, {"use_sliding_window": False}], ids=str)
def test_windows_that_are_turned_off_are_told(target, tmp_path: Path, off: Values):
    values, tensors = read(written(tmp_path / "ours"))
    on = SLIDING | {"use_sliding_window": True}
    directory = write(tmp_path / "theirs", values | on | off, tensors)
    with pytest.warns(UserWarning, match="name windows, which its other keys turn off"):
        model = tiny.load_drafter(directory, target.decoder)
    assert not any(layer.attention.window for layer in model.config.transformer.layers)


def test_windows_are_told(tmp_path: Path):
    found = diagnose(written(tmp_path / "ours", windows=(None, 2048)))
    assert found.facts["layers"] == "2, Qwen3-style, 1 of them with a window of 2,048"


@pytest.mark.parametrize(
    "rope", [{"rope_type": "mrope"}, {"rope_type": "default"}, {"type": "mrope"}]
)
def test_sections_of_multimodal_rotation_are_plain_in_text(target, tmp_path: Path, rope: Values):
    values, tensors = read(written(tmp_path / "ours"))
    values["rope_parameters"] = {**rope, "mrope_section": [4, 2, 2], "rope_theta": 10_000.0}
    loaded = tiny.load_drafter(write(tmp_path / "theirs", values, tensors), target.decoder)
    assert loaded.config == tiny.load_drafter(tmp_path / "ours", target.decoder).config

"""Targets in the packed formats that people download, beside their dequantised twins."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from packed_targets import FORMS, Form, pack_target
from safetensors.torch import load_file, save_file

from peagle.config import SamplingParams
from peagle.drafters.lookup import Lookup
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models import loading
from peagle.models.formats.layout import Layout
from peagle.models.loading import check_decoder, load_ends, load_layers, stored_bytes
from peagle.models.weights import read_json, read_tensors
from peagle.ops.weight import QuantizedWeight, weights_of
from saving import save_target

TOKENS = list(range(3, 60))
SIZES = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "gemma4_moe": {"moe_intermediate_size": 64},
}


def target(tmp_path: Path, family: str = "qwen3", **changes: object) -> Path:
    sizes = {"tie_word_embeddings": False, **SIZES.get(family, {}), **changes}
    return tiny.save_target(tmp_path / "target", family, **sizes)


def logits(directory: Path) -> torch.Tensor:
    return tiny.run_target(tiny.load_target(directory), TOKENS)[0]


@pytest.mark.sweep
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "gemma4_moe"])
def test_every_format_gives_what_its_dequantised_twin_gives(tmp_path: Path, family: str, form: str):
    directory = target(tmp_path, family)
    twin = pack_target(directory, FORMS[form])
    check_decoder(directory)
    decoder = tiny.load_target(directory)
    packed = [part for part in decoder.layers.modules() if isinstance(part, QuantizedWeight)]
    products = 6 if family == "gemma4_moe" else 4
    assert len(packed) == products * len(decoder.layers)
    found = tiny.run_target(decoder, TOKENS)[0]
    torch.testing.assert_close(found, logits(twin), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_text_is_the_same_with_every_way_to_draft(tmp_path: Path, form: str):
    directory = target(tmp_path)
    pack_target(directory, FORMS[form])
    decoder = tiny.load_target(directory)
    how, prompts = SamplingParams(max_tokens=20), [TOKENS[:9], TOKENS[20:50], [5, 6, 7] * 5]
    config = tiny.engine_config()
    plain = tiny.outputs(tiny.run(Engine(decoder, None, 0, config), prompts, how))
    for parallel in (True, False):
        folder = tmp_path / f"drafter{parallel}"
        drafter = tiny.random_drafter_for(decoder, folder, tiny.drafter_config(parallel=parallel))
        drafted = tiny.run(Engine(decoder, drafter, 5, config), prompts, how)
        assert tiny.outputs(drafted) == plain
    lookup = Lookup(1, 4, tiny.CPU)
    assert tiny.outputs(tiny.run(Engine(decoder, lookup, 5, config), prompts, how)) == plain


@pytest.mark.parametrize("form", FORMS)
def test_its_memory_is_known_from_names_alone(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
):
    asked: list[int] = []
    monkeypatch.setattr(loading, "require_memory", lambda needed, *_: asked.append(needed))
    directory = target(tmp_path)
    pack_target(directory, FORMS[form])
    held = sum(w.nbytes for w in weights_of(tiny.load_target(directory, torch.bfloat16)))
    names = dict.fromkeys(load_file(directory / "model.safetensors"), "model-1-of-1.safetensors")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    stored = stored_bytes(directory, torch.bfloat16)
    assert asked == [held] == [stored.ends + stored.layers]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_written_again_is_what_was_read_or_refused(tmp_path: Path, form: str):
    directory, copy = target(tmp_path), tmp_path / "copy"
    pack_target(directory, FORMS[form])
    copy.mkdir()
    ends = load_ends(directory, torch.float32, tiny.CPU)
    layers = load_layers(directory, torch.float32, tiny.CPU)
    values = read_json(directory / "config.json")
    if form.startswith(("awq", "gptq")):
        with pytest.raises(InputError, match="weights are not written in"):
            save_target(copy, values, ends, layers)
        return
    save_target(copy, values, ends, layers)
    wanted, found = read_tensors(directory), read_tensors(copy)
    assert found.keys() == {name for name in wanted if "input_scale" not in name}
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(*(x.flatten().view(torch.uint8) for x in (tensor, wanted[name]))), name


Q = "model.layers.0.self_attn.q_proj"
V = "model.layers.0.self_attn.v_proj"
OUT = "model.layers.0.self_attn.o_proj"
Tensors = dict[str, torch.Tensor]


def plain(tensors: Tensors, name: str, end: str) -> None:
    """A weight in 16 bits among packed ones."""
    for found in [found for found in tensors if found.startswith(f"{name}.")]:
        del tensors[found]
    tensors[f"{name}.{end}"] = torch.randn(32, 64).bfloat16()


REFUSED: list[tuple[str, Callable[[Tensors], object], str]] = [
    (
        "nvfp4 of compressed-tensors",
        lambda t: plain(t, V, "weight"),
        rf"{Q}\.weight is NVFP4 and {V}\.weight is not, or not alike; peagle multiplies them",
    ),
    (
        "nvfp4 of modelopt, the head too",
        lambda t: plain(t, V, "weight"),
        rf"missing tensors: {V}\.weight_scale, .*{V}\.weight is torch\.bfloat16 .* need one format",
    ),
    (
        "nvfp4 of modelopt, the head too",
        lambda t: t.update({f"{Q}.pre_quant_scale": torch.ones(64)}),
        rf"{Q}\.pre_quant_scale: inputs of products are scaled",
    ),
    (
        "nvfp4 of modelopt, the head too",
        lambda t: t.update({f"{Q}.svdquant_lora_a": torch.ones(64)}),
        "low-rank parts beside the weights",
    ),
    (
        "nvfp4 of modelopt, the head too",
        lambda t: t[f"{Q}.weight_scale_2"].zero_(),
        r"weight_scale_2 is 0\.0; it must be above 0",
    ),
    (
        "nvfp4 of compressed-tensors",
        lambda t: t.update({f"{Q}.weight_zero_point": torch.ones(64)}),
        rf"{Q}\.weight_zero_point: FP4 with zero points is not supported",
    ),
    (
        "nvfp4 of compressed-tensors",
        lambda t: t[f"{Q}.weight_scale"].view(torch.uint8).fill_(0x81),
        rf"{Q}\.weight_scale: NVFP4 weights have scales below 0",
    ),
    (
        "gptq",
        lambda t: t.update({f"{OUT}.g_idx": torch.arange(64).flip(0).int()}),
        r"inputs are in the order of their groups \(g_idx\); re-quantise with desc_act false",
    ),
    ("gptq", lambda t: t[f"{Q}.qzeros"].zero_(), "says sym, and there are other zero points"),
    (
        "gptq",
        lambda t: t.update({f"{OUT}.bias": torch.eye(64)[3]}),
        rf"its tensor {OUT}\.bias is a bias, and the model's product has none",
    ),
    (
        "int4",
        lambda t: t.update({f"{Q}.weight_scale": torch.ones(64, 1)}),
        rf"{Q}\.weight_scale has shape \[64, 1\], expected \[64, 2\]",
    ),
    (
        "int4",
        lambda t: t.update({"model.norm.weight_shape": torch.tensor([64, 1])}),
        r"model\.norm\.weight has scales; peagle reads INT4 in products",
    ),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSED)
def test_what_does_not_fit_is_named(
    tmp_path: Path, form: str, change: Callable[[Tensors], object], message: str
):
    directory = target(tmp_path)
    pack_target(directory, FORMS[form])
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match=message) as caught:
        tiny.load_target(directory)
    assert str(directory) in str(caught.value)


def test_an_order_of_inputs_that_is_none_is_read(tmp_path: Path):
    """Whatever `desc_act` says."""
    directory = target(tmp_path)
    twin = pack_target(directory, FORMS["gptq"])
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qweight")]:
        order = torch.arange(tensors[name].shape[0] * 8) // 32
        tensors[name.replace("qweight", "g_idx")] = order.int()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_rules_that_leave_modules_as_they_are(tmp_path: Path):
    """As in published files of Qwen3.5 by GPTQ, whose attention is plain."""
    directory, form = target(tmp_path), FORMS["gptq"]
    rules = {"-:.*attn.*": {}, "-:.*mtp.*": {}, "lm_head": {}}
    settings = {**form.settings, "dynamic": rules}
    plain = form.layout

    def layout(name: str) -> Layout | None:
        return None if "attn" in name else plain(name)

    twin = pack_target(directory, Form(settings, layout))
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)


def test_biases_of_zeros_are_left_out(tmp_path: Path):
    """Which GPTQ's writers put beside products that have none."""
    directory = target(tmp_path)
    twin = pack_target(directory, FORMS["gptq"])
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if name.endswith("qweight")]:
        tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)
    check_decoder(directory)


@pytest.mark.parametrize("algorithm", ["W4A16_NVFP4", "W4A8_NVFP4_FP8"])
def test_a_scale_of_two_blocks_is_each_ones(tmp_path: Path, algorithm: str):
    """As modelopt writes groups of 32 inputs in NVFP4."""
    directory, form = target(tmp_path), FORMS["nvfp4 of modelopt, the head too"]
    pack_target(directory, Form({**form.settings, "quant_algo": algorithm}, form.layout))
    file = directory / "model.safetensors"
    wide = {
        name: tensor[:, ::2].contiguous() if name.endswith("weight_scale") else tensor
        for name, tensor in load_file(file).items()
    }
    twice = {
        name: tensor.repeat_interleave(2, 1) if name.endswith("weight_scale") else tensor
        for name, tensor in wide.items()
    }
    save_file(twice, file, {"format": "pt"})
    expected = logits(directory)
    save_file(wide, file, {"format": "pt"})
    torch.testing.assert_close(logits(directory), expected, atol=0, rtol=0)


@pytest.mark.parametrize("beside", ["FP8", "MIXED_PRECISION", "W4A8_AWQ"])
def test_two_descriptions_that_differ_are_told_once(tmp_path: Path, beside: str):
    """And the tensors decide."""
    directory = target(tmp_path)
    twin = pack_target(directory, FORMS["mixed by module"])
    quantized = {"a": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    said = {"quantization": {"quant_algo": beside, "quantized_layers": quantized}}
    (directory / "hf_quant_config.json").write_text(json.dumps(said))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        found = logits(directory)
        logits(directory)
    said = [str(w.message) for w in told if "hf_quant_config" in str(w.message)]
    assert len(said) == (beside != "FP8")
    torch.testing.assert_close(found, logits(twin), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("form", ["nvfp4 of modelopt, the head too", "mixed by layer"])
def test_a_packed_head_of_tied_embeddings_is_used(tmp_path: Path, form: str):
    """Without a word: it is there to be read in their place."""
    directory = target(tmp_path)
    twin = pack_target(directory, FORMS[form])
    values = {**read_json(directory / "config.json"), "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(values))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        decoder = tiny.load_target(directory)
    assert not [w for w in told if "head" in str(w.message)]
    assert isinstance(decoder.head.weight, QuantizedWeight)
    torch.testing.assert_close(logits(directory), logits(twin), atol=1e-4, rtol=1e-4)

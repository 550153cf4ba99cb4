"""A packed drafter is read, drafts, and is trained on like any other."""

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file

import pack_drafter
from peagle.config import SamplingParams
from peagle.drafters.checkpoint import unpacked
from peagle.drafters.diagnosis import diagnose
from peagle.drafters.methods import drafter_for
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.models.spec import MLPSpec
from peagle.models.weights import read_json
from peagle.ops.weight import QuantizedWeight
from peagle.train.prepare import prepare

LAYER = replace(tiny.DRAFT_LAYER, feed_forward=MLPSpec(128))
"""One whose products all have whole groups of inputs."""
PRODUCTS = ["fc", "lm_head", "layers.0.mlp.down_proj", "layers.1.self_attn.k_proj"]


@pytest.fixture(scope="module", params=[(30, 4), (tiny.VOCAB, 4), (30, 8)])
def drafters(request, tmp_path_factory) -> tuple[Path, Path]:
    """The same drafter in float32 and in few bits: with a reduced vocabulary, and the whole."""
    folder, (words, bits) = tmp_path_factory.mktemp("packed"), request.param
    config = tiny.drafter_config(True, layer=LAYER, draft_vocab=words)
    plain = tiny.save_random_drafter(folder / "plain", config)
    pack_drafter.main(plain, folder / "packed", bits)
    return plain, folder / "packed"


def test_it_is_small_and_nothing_is_wrong_with_it(drafters, target):
    plain, packed = drafters
    tensors = load_file(packed / "model.safetensors")
    assert {f"{name}.weight_packed" for name in PRODUCTS} <= tensors.keys()
    assert not {f"{name}.weight" for name in PRODUCTS} & tensors.keys()
    found, whole = (diagnose(each, target.directory) for each in (packed, plain))
    assert found.problems == ()
    assert "packed integers" in found.facts["dtype"]
    assert found.facts["parameters"] == whole.facts["parameters"]


def test_it_is_read_as_numbers_near_those_before(drafters, target):
    before, after = (tiny.load_drafter(each, target.decoder) for each in drafters)
    assert not any(isinstance(part, QuantizedWeight) for part in after.modules())
    assert isinstance(target.decoder.embed.weight, torch.Tensor)
    rounded = 0
    for (name, one), other in zip(before.named_parameters(), after.parameters(), strict=True):
        if one.ndim == 2 and name != "embed.weight":
            groups, apart = (each.unflatten(1, (-1, 64)) for each in (one, one - other))
            assert (apart.abs() <= 0.3 * groups.abs().amax(2, keepdim=True)).all(), name
            assert 0 < apart.norm() < 0.12 * one.norm(), name
            rounded += 1
        else:
            assert torch.equal(one, other), name
    assert rounded == 2 + 2 * 4


def test_the_text_is_the_targets(drafters, target):
    decoder, how = target.decoder, SamplingParams(max_tokens=16)
    prompts, config = [[5, 6, 7, 8, 9], [30, 31, 32]], tiny.engine_config()
    drafter = drafter_for(tiny.load_drafter(drafters[1], decoder))
    plain = tiny.run(Engine(decoder, None, 0, config), prompts, how)
    drafted = tiny.run(Engine(decoder, drafter, 4, config), prompts, how)
    assert tiny.outputs(drafted) == tiny.outputs(plain)


def test_training_goes_on_from_it(drafters, recipe_for, tmp_path):
    sizes = {"num_hidden_layers": 4, "taps": None}
    recipe = recipe_for(tmp_path / "more", initial_drafter=str(drafters[1]), **sizes)
    model = prepare(recipe).model
    assert all(weight.requires_grad for weight in model.first.parameters())
    assert not any(isinstance(part, QuantizedWeight) for part in model.modules())


def test_a_scale_loses_no_more_than_the_usual_one():
    """Where one number of a group is far from the others, it is cut."""
    weight = torch.randn(8, 128)
    weight[:, 5] = 4.0
    part = pack_drafter.rounded(weight, pack_drafter.LAYOUTS[4])
    codes = (torch.stack((part.packed & 15, part.packed >> 4), -1).flatten(1).int() - 8).float()
    groups = weight.unflatten(1, (-1, 64))
    ours = codes.unflatten(1, (-1, 64)) * part.scales.float()[..., None]
    usual = groups.abs().amax(2, keepdim=True) / 7
    theirs = (groups / usual).round() * usual
    assert (ours - groups).square().sum() < 0.9 * (theirs - groups).square().sum()


def test_16_bits_hold_what_eight_do():
    weight = torch.randn(8, 128)
    part = pack_drafter.in_powers(weight, pack_drafter.LAYOUTS[8])
    scales = part.scales.float().repeat_interleave(64, dim=1)
    found = part.packed.view(torch.int8) * scales
    assert torch.equal(found.bfloat16().float(), found)
    assert torch.equal(found.half().float(), found)
    assert ((found - weight).abs() <= scales / 2).all()


def test_a_copy_for_vllm_has_the_same_numbers_in_16_bits(drafters, target, tmp_path):
    plain, packed = drafters
    copy = unpacked(packed, tmp_path / "copy")
    assert copy == tmp_path / "copy"
    assert diagnose(copy, target.directory).problems == ()
    assert "quantization_config" not in read_json(copy / "config.json")
    found, wanted = (
        tiny.load_drafter(path, target.decoder).state_dict() for path in (copy, packed)
    )
    assert found.keys() == wanted.keys()
    for name, own in wanted.items():  # embeddings and norms as they were
        assert any(torch.equal(found[name], x) for x in (own, own.bfloat16().float())), name
    assert unpacked(plain, tmp_path / "none") == plain
    assert not (tmp_path / "none").exists()


def test_other_bits(tmp_path):
    with pytest.raises(InputError, match="--bits 3: give 4 or 8"):
        pack_drafter.main(tmp_path, tmp_path / "out", 3)


def test_inputs_that_are_no_whole_groups(tmp_path):
    plain = tiny.save_random_drafter(tmp_path / "plain", tiny.drafter_config(True))
    with pytest.raises(InputError, match=r"96 inputs by config\.json, in groups of 64"):
        pack_drafter.main(plain, tmp_path / "out")
    assert not (tmp_path / "out").exists()

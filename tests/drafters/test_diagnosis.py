import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import (
    MASK,
    VOCAB,
    drafter_config,
    load_drafter,
    save_random_drafter,
    save_target,
)

from peagle.drafters.diagnosis import diagnose
from peagle.drafters.kind import EAGLE3, PEAGLE
from peagle.drafters.vocabulary import membership
from peagle.errors import InputError
from peagle.models.families import read_spec
from peagle.models.loading import load_decoder
from peagle.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def peagle(tmp_path):
    return save_random_drafter(tmp_path / "peagle", drafter_config(parallel=True))


@pytest.fixture
def reduced(tmp_path):
    return save_random_drafter(tmp_path / "reduced", drafter_config(parallel=False, draft_vocab=40))


DEFAULT = "(vLLM's default; the file names none)"


def set_config(directory, **changes):
    path = directory / "config.json"
    values = json.loads(path.read_text()) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    path.write_text(json.dumps(kept))


def set_tensors(directory, **changes):
    tensors = load_file(directory / "model.safetensors") | changes
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")


def test_a_sound_drafter_is_described(peagle, target):
    for found in (diagnose(peagle), diagnose(peagle, target)):
        assert found.problems == ()
        assert found.config.trained_tokens == 8
        assert dict(found.facts) == {
            "method": "P-EAGLE: K tokens in one pass",
            "layers": "2, Qwen3-style",
            "hidden size": "64 (target 64)",
            "vocabulary": str(VOCAB),
            "draft vocabulary": str(VOCAB),
            "aux layers": "1, 2, 3",
            "mask token id": str(MASK),
            "trained for K": "8",
            "correction": "none",
            "dtype": "float32",
            "parameters": f"{sum(t.numel() for t in weights(peagle)):,}",
            "size": f"{sum(t.nbytes for t in weights(peagle)) / 2**20:.1f} MiB",
        }


def weights(directory):
    return load_file(directory / "model.safetensors").values()


def test_an_eagle3_drafter_with_a_reduced_vocabulary_is_described(reduced, target):
    found = diagnose(reduced, target, EAGLE3)
    assert found.problems == ()
    assert found.facts["method"] == "EAGLE-3: K tokens in K passes"
    assert found.facts["draft vocabulary"] == "40"
    assert found.facts["mask token id"] == "none"


def test_aux_layers_left_to_the_default_follow_the_target(peagle, tmp_path):
    set_config(peagle, eagle_aux_hidden_state_layer_ids=None)
    deep = save_target(tmp_path / "deep", num_hidden_layers=8)
    assert diagnose(peagle).facts["aux layers"] == f"2, N/2, N-3 of the target's N {DEFAULT}"
    found = diagnose(peagle, deep)
    assert (found.facts["aux layers"], found.problems) == (f"2, 4, 5 {DEFAULT}", ())


CONFIG_FAULTS = {
    "features of width 32, the target's hidden size is 64": {"target_hidden_size": 32},
    "vocabulary has 99 tokens, the target's 96": {"vocab_size": 99},
    r"aux layers \[1, 2, 9\] are not all within the target's 0 to 4": {
        "eagle_aux_hidden_state_layer_ids": [1, 2, 9]
    },
    r"aux layers \[1, 1, 2\] repeat": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]},
    "mask token id 96 is outside the vocabulary": {"ptd_token_id": VOCAB, "pard_token": VOCAB},
    "has mask_hidden: it is a P-EAGLE drafter without a mask token id": {
        "ptd_token_id": None,
        "pard_token": None,
    },
    "config.json lacks hidden_size": {"hidden_size": None},
    "architecture BertModel is not": {"architectures": ["BertModel"]},
    "missing tensors: .*layers.2": {"num_hidden_layers": 3},
    "draft_vocab_size is -1; it must be at least 1": {"draft_vocab_size": -1},
    "num_speculative_tokens is -3; it must be at least 1": {"num_speculative_tokens": -3},
    "counts 3 aux layers and names 2": {"eagle_aux_hidden_state_layer_ids": [1, 2]},
    "lists 2 aux layers, and its fc reads 3": {
        "eagle_aux_hidden_state_layer_ids": [1, 2],
        "num_aux_hidden_states": None,
    },
    "counts 5 aux layers and names none": {
        "eagle_aux_hidden_state_layer_ids": None,
        "num_aux_hidden_states": 5,
    },
}


@pytest.mark.parametrize("complaint", CONFIG_FAULTS)
def test_a_fault_of_the_configuration_is_named(peagle, target, complaint):
    set_config(peagle, **CONFIG_FAULTS[complaint])
    assert_found(peagle, target, complaint)


TENSOR_FAULTS = {
    "missing tensors: fc.weight, norm.weight": {"fc.weight": None, "norm.weight": None},
    "unexpected tensors: extra": {"extra": torch.zeros(2)},
    r"norm.weight has shape \[63\], expected \[64\]": {"norm.weight": torch.ones(63)},
    "norm.weight is torch.int64, expected a floating": {"norm.weight": torch.ones(64).long()},
    "NaN or infinite values in fc.weight, norm.weight": {
        "fc.weight": torch.full((64, 192), torch.nan),
        "norm.weight": torch.full((64,), torch.inf),
    },
}


@pytest.mark.parametrize("complaint", TENSOR_FAULTS)
def test_a_fault_of_the_tensors_is_named(peagle, target, complaint):
    set_tensors(peagle, **TENSOR_FAULTS[complaint])
    assert_found(peagle, target, complaint)


@pytest.mark.parametrize(
    ("d2t", "complaint"),
    [
        (None, "needs the tensor d2t"),
        (torch.arange(40) + 60, "d2t does not map every draft id"),
        (torch.zeros(39, dtype=torch.int64), "d2t does not map every draft id"),
    ],
)
def test_a_fault_of_the_vocabulary_map_is_named(reduced, target, d2t, complaint):
    set_tensors(reduced, d2t=d2t)
    assert_found(reduced, target, complaint)


KEPT = torch.arange(0, 80, 2)
RIGHT = {"d2t": KEPT - torch.arange(40), "t2d": membership(KEPT, VOCAB)}
DOUBTS = {
    "d2t is torch.bfloat16, which rounds large": {"d2t": RIGHT["d2t"].bfloat16()},
    "d2t is torch.float32, which rounds large": {"d2t": RIGHT["d2t"].float()},
    "d2t maps 3 draft ids to tokens that others": {
        "d2t": torch.where(torch.arange(40) < 4, -torch.arange(40), RIGHT["d2t"])
    },
    "d2t is all zeros": {"d2t": torch.zeros(40, dtype=torch.int64), "t2d": None},
    "d2t and t2d disagree about 40 tokens": {"d2t": torch.zeros(40, dtype=torch.int64)},
    "d2t and t2d disagree about 2 tokens": {"t2d": membership(KEPT + (KEPT == 78), VOCAB)},
    r"t2d has shape \[40\], expected \[96\]": {"t2d": torch.ones(40, dtype=torch.bool)},
}


@pytest.mark.parametrize("complaint", DOUBTS)
def test_a_map_that_makes_drafts_of_other_tokens_is_named(reduced, target, complaint):
    """It runs, and tells so: the text is the target's own whatever is drafted."""
    set_tensors(reduced, **{**RIGHT, **DOUBTS[complaint]})
    [problem] = diagnose(reduced, target).problems
    assert re.match(f"{complaint}.*; export the drafter again", problem)
    decoder = load_decoder(target, torch.float32, torch.device("cpu"))
    with pytest.warns(UserWarning, match=f"reduced: {complaint}"):
        load_drafter(reduced, decoder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"t2d": None},
        {"t2d": RIGHT["t2d"].to(torch.int64)},
        {"d2t": RIGHT["d2t"].to(torch.int32)},
        {
            "d2t": torch.zeros(40, dtype=torch.int64),
            "t2d": membership(torch.arange(40), VOCAB),
        },
    ],
)
def test_a_map_that_is_right_is_no_problem(reduced, target, changes, recwarn):
    set_tensors(reduced, **{**RIGHT, **changes})
    assert diagnose(reduced, target).problems == ()
    load_drafter(reduced, load_decoder(target, torch.float32, torch.device("cpu")))
    assert not [one for one in recwarn if "d2t" in str(one.message)]


def assert_found(directory, target, complaint):
    """The diagnosis names this fault and a fix, and the engine refuses the directory too."""
    assert re.search(complaint, diagnose(directory, target).problems[0])
    decoder = load_decoder(target, torch.float32, torch.device("cpu"))
    with pytest.raises(InputError):
        load_drafter(directory, decoder)


@pytest.mark.parametrize(
    ("kind", "complaint"), [(PEAGLE, None), (EAGLE3, "kind is P-EAGLE, not EAGLE-3")]
)
def test_the_method_it_is_to_run_as_is_compared(peagle, target, kind, complaint):
    problems = diagnose(peagle, target, kind).problems
    assert len(problems) == (complaint is not None)
    assert all(complaint in problem for problem in problems)
    assert all(problem.endswith("; bench takes it as --peagle") for problem in problems)


def test_hundreds_of_broken_tensors_are_a_few_and_a_count(peagle):
    set_tensors(peagle, **{f"x{i:03}": torch.full((1,), torch.nan) for i in range(200)})
    problems = diagnose(peagle).problems
    assert "NaN or infinite values in x000, x001, x002, x003 and 196 more; use" in problems[0]
    assert "unexpected tensors: x000, x001, x002, x003 and 196 more; export" in problems[1]


def test_every_problem_is_found_at_once(peagle, target):
    set_config(peagle, vocab_size=99, eagle_aux_hidden_state_layer_ids=[1, 2, 9])
    set_tensors(peagle, extra=torch.tensor([torch.nan]))
    problems = " ".join(diagnose(peagle, target).problems)
    for part in ("99 tokens", "[1, 2, 9]", "NaN or infinite", "unexpected tensors: extra"):
        assert part in problems


def test_what_is_broken_on_disk_is_a_problem_among_the_others(peagle, target):
    data = (peagle / "model.safetensors").read_bytes()
    (peagle / "model.safetensors").write_bytes(data[:-100])
    set_config(peagle, vocab_size=99)
    problems = diagnose(peagle, target).problems
    assert len(problems) == 2
    assert "damaged or cut short" in problems[0]
    assert "99 tokens" in problems[1]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_configuration_that_cannot_be_read_is_a_problem_beside_its_tensors(
    peagle, target, text: str
):
    (peagle / "config.json").write_text(text)
    set_tensors(peagle, extra=torch.tensor([torch.nan]))
    problems = diagnose(peagle, target).problems
    assert len(problems) == 2
    assert "config.json" in problems[0]
    assert "NaN or infinite" in problems[1]


def test_a_tensor_under_two_names_is_a_problem_among_the_others(peagle, target):
    set_tensors(peagle, **{"midlayer.hidden_norm.weight": torch.ones(64)})
    set_config(peagle, vocab_size=99)
    problems = " ".join(diagnose(peagle, target).problems)
    for part in ("one tensor under two names", "99 tokens"):
        assert part in problems


def test_weights_without_a_configuration_are_still_looked_at(peagle):
    (peagle / "config.json").unlink()
    found = diagnose(peagle)
    assert found.facts["dtype"] == "float32"
    assert "no config.json" in found.problems[0]


def test_pickles_are_pointed_out_and_not_opened(peagle, target):
    (peagle / "model.safetensors").rename(peagle / "pytorch_model.bin")
    (problem,) = diagnose(peagle, target).problems
    assert "pickle files are never loaded" in problem


def test_a_target_in_the_drafters_place_is_recognised(target):
    (problem,) = diagnose(target).problems
    assert "whole language model" in problem


def test_a_drafter_in_the_targets_place_is_recognised(peagle):
    with pytest.raises(InputError, match="is a drafter; give the model that it drafts for"):
        read_spec(peagle)
    with pytest.raises(InputError, match="is a drafter; give the model that it drafts for"):
        load_tokenizer(peagle)


def test_a_target_that_cannot_be_used_is_a_problem_too(peagle, target, tmp_path):
    other = shutil.copytree(target, tmp_path / "other")
    set_config(other, architectures=["Own"], model_type="own")
    (problem,) = diagnose(peagle, other).problems
    assert "does not know the model type own" in problem

import json
import re
from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.models.generation_config import end_tokens, sampling_defaults


def suggest(directory: Path, **values: object) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


@pytest.mark.parametrize(
    ("generation", "model", "ids"),
    [
        ({"eos_token_id": 5}, {"eos_token_id": 7}, (5, 7)),
        ({"eos_token_id": [5, 6]}, {"eos_token_id": [5, 8]}, (5, 6, 8)),
        ({"eos_token_id": 5}, {"text_config": {"eos_token_id": 7}}, (5, 7)),
        ({"eos_token_id": [5, 6]}, {}, (5, 6)),
        ({}, {"eos_token_id": 7}, (7,)),
        (None, {"eos_token_id": [8]}, (8,)),
        (None, {"eos_token_id": None}, ()),
        ({"eos_token_id": -1}, {"eos_token_id": [-1, 3]}, (3,)),
    ],
)
def test_where_the_end_of_text_is_read(tmp_path: Path, generation, model, ids: tuple[int, ...]):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    (tmp_path / "config.json").write_text(json.dumps(model))
    assert end_tokens(tmp_path, None) == ids
    assert end_tokens(tmp_path, 9) == (9, *ids)
    assert end_tokens(tmp_path, 5) == (5, *(token for token in ids if token != 5))


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("ids", [[0, None], [0, "x"], [[0]], {"a": 1}, True, 1.5, "0"])
def test_ends_of_text_that_are_no_tokens(tmp_path: Path, name: str, ids: object):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": ids}))
    message = f"{name}: eos_token_id {ids} must be a token id or a list of them"
    with pytest.raises(InputError, match=re.escape(message)):
        end_tokens(tmp_path, None)


def test_what_is_suggested(tmp_path: Path):
    """And nothing else that the file says."""
    assert sampling_defaults(tmp_path) == {}
    values = {"temperature": 1, "top_k": -1, "top_p": 0.9, "min_p": None, "self": 1}
    expected = {"temperature": 1.0, "top_k": -1, "top_p": 0.9}
    assert sampling_defaults(suggest(tmp_path, **values)) == expected
    greedy = suggest(tmp_path, top_k=-2, top_p=0.0, repetition_penalty=1.05, do_sample=False)
    assert sampling_defaults(greedy) == {"temperature": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("top_p", 0),
        ("top_p", True),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", True),
        ("temperature", float("inf")),
        ("temperature", "1"),
        ("min_p", 2),
        ("repetition_penalty", 0),
    ],
)
def test_what_cannot_be_suggested(tmp_path: Path, key: str, value: object):
    path = suggest(tmp_path, **{key: value}) / "generation_config.json"
    with pytest.raises(InputError, match=rf"^{path}: {key}: .*; correct or remove it$"):
        sampling_defaults(tmp_path)

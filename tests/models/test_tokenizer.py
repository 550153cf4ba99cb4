import json
from pathlib import Path

import pytest
from tiny_pair import save_tokenizer

from peagle.errors import InputError
from peagle.models.families import FAMILIES
from peagle.models.tokenizer import load_tokenizer


@pytest.mark.parametrize("kind", ["xlnet", ["llama"]])
def test_a_tokenizer_that_another_family_would_need(tmp_path: Path, kind: object):
    save_tokenizer(tmp_path)
    values = {"model_type": kind, "max_position_embeddings": 512}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(InputError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: model_type {kind} is not supported; peagle runs "
        f"{', '.join(family.model_type for family in FAMILIES.values())}"
    )


def test_a_template_in_the_file_of_processors(tmp_path: Path):
    """As Mistral Small 3.1 was published; one of the tokenizer's own comes first."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "chat_template.jinja").unlink()
    assert load_tokenizer(tmp_path).chat_template is None
    template = "{{ messages[0]['content'] }}!"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert load_tokenizer(tmp_path).chat_template == template
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load_tokenizer(tmp_path).chat_template == "own"


def test_a_tokenizer_that_is_code(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = {"auto_map": {"AutoTokenizer": ["own.Words", None]}, "tokenizer_class": "Words"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("raise AssertionError('run')")
    with pytest.raises(InputError) as caught:
        load_tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has no usable tokenizer: it is code of its own (auto_map in "
        "tokenizer_config.json), which peagle never runs; convert it to a tokenizer.json, or serve "
        "the model with vLLM's --trust-remote-code"
    )


def test_a_wrong_key_of_the_configuration_is_told_with_its_reason(tmp_path: Path):
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "num_hidden_layers": "many"}')
    with pytest.raises(InputError, match=r"'num_hidden_layers': TypeError: .*int.* 'many'"):
        load_tokenizer(tmp_path)

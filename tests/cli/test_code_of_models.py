"""Directories of models may hold code of their own; no command runs it, whatever is answered."""

import io
import json
import shutil
from pathlib import Path

import pytest
import yaml

CODE = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path(__file__).with_name("ran").touch()
Path({ran!r}).touch()


class Config(LlamaConfig):
    model_type = "own"


class Model(LlamaForCausalLM):
    config_class = Config


class Words(PreTrainedTokenizerFast):
    pass
"""
NAMES = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}


def change_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the code writes, and a user who agrees to everything."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 50))
    return tmp_path / "ran"


@pytest.fixture
def target(pair, ran: Path, tmp_path: Path) -> Path:
    """A target that peagle knows, with code for its configuration, model, tokenizer and texts."""
    place = shutil.copytree(pair.target, tmp_path / "target")
    (place / "own.py").write_text(CODE.format(ran=str(ran)))
    (place / "custom_generate").mkdir()
    (place / "custom_generate" / "generate.py").write_text(CODE.format(ran=str(ran)))
    change_json(place / "config.json", auto_map=NAMES)
    words = {"AutoTokenizer": [None, "own.Words"]}
    change_json(place / "tokenizer_config.json", auto_map=words, tokenizer_class="Words")
    return place


@pytest.fixture
def commands(target: Path, pair, recipe_for, tmp_path: Path) -> dict[str, list[object]]:
    given = recipe_for(tmp_path / "out", steps=2).model_dump(mode="json", exclude_defaults=True)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(given | {"target": str(target)}))
    return {
        "generate": ["--target", target, "--prompt", "Hello", "--max-tokens", 2],
        "check": [pair.peagle, "--target", target],
        "train": [recipe, "--dry-run"],
        "serve": [target, "--port", 0],
    }


@pytest.mark.parametrize("command", ["generate", "check", "train"])
def test_a_known_family_is_read_without_its_code(peagle, commands, ran: Path, command: str):
    result = peagle(command, *commands[command])
    assert (result.code, ran.exists()) == (0, False), result.err


@pytest.mark.parametrize("command", ["generate", "check", "train", "serve"])
def test_another_family_is_refused_without_its_code(
    peagle, commands, target: Path, ran: Path, command: str
):
    change_json(target / "config.json", model_type="own", architectures=["Model"])
    result = peagle(command, *commands[command])
    assert result.code != 0
    assert not ran.exists()
    told = (
        "is not supported; peagle runs ",
        "does not know the model type own; code in its directory",
    )
    assert any(each in result.err + result.out for each in told)

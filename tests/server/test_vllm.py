"""`--engine vllm`: the command line that vLLM gets."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from peagle.cli.app import app, main
from peagle.config import SpeculativeConfig
from peagle.drafters.checkpoint import unpacked
from peagle.pair import bundled
from peagle.server.vllm import TABLE

FAKE = "#!/bin/sh\nprintf '%s\\n' \"$@\"\n"


def install(directory: Path) -> Path:
    """A `vllm` that prints its arguments."""
    directory.mkdir(exist_ok=True)
    path = directory / "vllm"
    path.write_text(FAKE)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of Python without vLLM, whatever this one has."""
    monkeypatch.setattr("sys.executable", str(tmp_path / "env" / "python"))


@pytest.fixture
def _vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `vllm` on the PATH, and a place for what is unpacked for it."""
    install(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def start(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Mapping[str, str]]:
    """What would replace this process: arguments and environment."""
    whole, environment = replacement(arguments, monkeypatch)
    return whole[1:], environment


def replacement(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[str], Mapping[str, str]]:
    """The same with the program."""
    seen: list[tuple[list[str], Mapping[str, str]]] = []
    monkeypatch.setattr("os.execvpe", lambda _, command, given: seen.append((command, given)))
    assert main(["serve", *arguments, "--engine", "vllm"]) == 0
    [found] = seen
    return found


def command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return start(arguments, monkeypatch)[0]


def test_the_table_names_flags_and_keys_that_there_are():
    commands: Any = typer.main.get_command(app)
    options = commands.commands["serve"].params
    flags = {flag for option in options for flag in (*option.opts, *option.secondary_opts)}
    assert {*TABLE["renamed"], *TABLE["ours"]} <= flags
    assert {*TABLE["our_keys"]} <= SpeculativeConfig.model_fields.keys()


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(
    "config",
    [
        '{"method":"ngram","num_speculative_tokens":7,"prompt_lookup_max":4}',
        '{"method":"mtp","num_speculative_tokens":3}',
    ],
)
def test_what_has_no_directory_gets_through(config: str, monkeypatch: pytest.MonkeyPatch):
    found = command(["t", "--speculative-config", config], monkeypatch)
    assert found == ["serve", "t", "--speculative-config", config]


@pytest.mark.usefixtures("_vllm")
def test_drafts_that_branch_are_ours_alone(monkeypatch: pytest.MonkeyPatch):
    config = '{"method":"eagle3","model":"d","num_speculative_tokens":7}'
    given = config.replace("}", ',"num_tree_nodes":15}')
    found = command(["t", "--speculative-config", given], monkeypatch)
    assert found == ["serve", "t", "--speculative-config", config]


@pytest.mark.usefixtures("_vllm")
def test_flags_and_pair_get_through(monkeypatch: pytest.MonkeyPatch):
    config = '{"method":"eagle3","model":"d","num_speculative_tokens":7,"parallel_drafting":true}'
    given = ["t", "--speculative-config", config, "--port", "9", "--max-model-len", "128"]
    given += ["--kv-cache-memory", "64", "--no-enable-prefix-caching", "--api-key", "a"]
    given += ["--api-key", "b", "--tensor-parallel-size", "2"]
    assert command(given, monkeypatch) == [
        *["serve", "t", "--speculative-config", config],
        *["--port", "9", "--max-model-len", "128", "--kv-cache-memory-bytes", "64"],
        *["--no-enable-prefix-caching", "--api-key", "a", "b"],
        *["--tensor-parallel-size", "2"],
    ]


@pytest.mark.usefixtures("_vllm")
def test_the_variables_key_stays_out_of_the_arguments(monkeypatch: pytest.MonkeyPatch):
    """Where `ps` would show it."""
    monkeypatch.setenv("PEAGLE_API_KEY", "a b\n")
    monkeypatch.setenv("VLLM_API_KEY", "other")
    arguments, environment = start(["t"], monkeypatch)
    assert (arguments, environment["VLLM_API_KEY"]) == (["serve", "t"], "a b")
    arguments, environment = start(["t", "--api-key", "c"], monkeypatch)
    assert arguments == ["serve", "t", "--api-key", "c"]
    assert environment["VLLM_API_KEY"] == "other"
    assert "PATH" in environment


@pytest.mark.usefixtures("_vllm")
def test_what_vllm_has_a_variable_for_is_no_flag(monkeypatch: pytest.MonkeyPatch):
    arguments, environment = start(["t", "--timeout-keep-alive", "65"], monkeypatch)
    assert arguments == ["serve", "t"]
    assert environment["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "65"
    assert "VLLM_HTTP_TIMEOUT_KEEP_ALIVE" not in start(["t"], monkeypatch)[1]


def test_its_own_flags_come_after_the_target(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "--tensor-parallel-size", "2", "--engine", "vllm"]) == 2
    assert "no such option: --tensor-parallel-size" in capsys.readouterr().err


@pytest.mark.usefixtures("_vllm")
def test_the_bundled_pair_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its drafter as a copy, since vLLM reads no packed one."""
    chat = {"method": "eagle3", "model": str(bundled("chat"))}
    for drafter in ([], ["--speculative-config", json.dumps(chat)]):
        found = command(drafter, monkeypatch)
        assert found[:2] == ["serve", str(bundled("target"))]
        copy = Path(json.loads(found[3])["model"])
        assert copy.is_relative_to(tmp_path / "cache" / "peagle")
        assert "quantization_config" not in json.loads((copy / "config.json").read_text())


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(
    "given", [{"method": "ngram", "model": None}, {"method": "eagle3", "model": "./plain/"}]
)
def test_what_is_not_packed_stays_as_it_is_said(
    given: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    unpacked(bundled("peagle"), tmp_path / "plain")
    found = command(["--speculative-config", json.dumps(given)], monkeypatch)
    assert json.loads(found[3]).get("model") == given["model"]
    assert "packed" not in capsys.readouterr().err


@pytest.mark.usefixtures("_vllm")
def test_where_no_copy_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["serve", "--engine", "vllm"]) == 2
    assert "cannot be written: Not a directory; XDG_CACHE_HOME" in capsys.readouterr().err


@pytest.mark.usefixtures("_vllm")
def test_the_target_as_a_flag_leaves_vllms_own_flags_whole(monkeypatch: pytest.MonkeyPatch):
    given = ["--target", "t", "--tensor-parallel-size", "2", "--port", "9", "--enforce-eager"]
    found = command(given, monkeypatch)
    assert found == ["serve", "t", "--port", "9", *given[2:4], "--enforce-eager"]


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(("method", "parallel"), [("peagle", True), ("eagle3", False)])
def test_a_drafter_by_flags_is_told_as_its_files_say(
    method: str, parallel: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drafter = str(unpacked(bundled(method), tmp_path / method))
    stated = {"method": "eagle3", "model": drafter, "parallel_drafting": parallel}
    for flags, k in ([], 8), (["--k", "3"], 3):
        _, _, name, config = command(["t", "--drafter", drafter, *flags], monkeypatch)
        assert name == "--speculative-config"
        assert json.loads(config) == stated | {"num_speculative_tokens": k}


@pytest.mark.usefixtures("_vllm")
@pytest.mark.parametrize(
    "flags",
    [
        ["--max-queue", "4"],
        ["--batch-invariant"],
        ["--no-quantize-activations"],
        ["--audit", "0.1"],
        ["--lora", "d"],
    ],
    ids=lambda flags: flags[0],
)
def test_flags_that_mean_nothing_to_vllm_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", "t", "--engine", "vllm", *flags]) == 2
    assert f"{flags[0]}: not with --engine vllm" in capsys.readouterr().err


@pytest.mark.usefixtures("_vllm")
def test_vllm_beside_this_python_goes_before_the_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """So `ENV/bin/peagle` finds it although the environment is not activated."""
    assert replacement(["t"], monkeypatch)[0][0] == str(tmp_path / "vllm")
    beside = install(tmp_path / "env")
    assert replacement(["t"], monkeypatch)[0][0] == str(beside)


def test_without_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["serve", "t", "--engine", "vllm"]) == 2
    assert "pip install vllm" in capsys.readouterr().err

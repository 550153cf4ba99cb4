import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

COMMANDS = ["demo", "generate", "serve", "bench", "check", "train", "regenerate"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_shows_an_example_that_fits_a_line(peagle, command):
    result = peagle(command, "--help")
    assert result.code == 0
    examples = result.out.partition("Example")[2].splitlines()[1:]
    assert examples
    assert all(re.match(rf"    (peagle {command}|echo)", line) for line in examples)


@pytest.mark.parametrize("command", [[], *([command] for command in COMMANDS)])
def test_help_has_a_short_form(peagle, command):
    assert peagle(*command, "-h") == peagle(*command, "--help")


def test_a_typo_in_a_commands_name_is_recognised(peagle):
    assert "Did you mean 'generate'" in peagle("genrate").err


def test_a_narrow_terminal_cuts_no_options_name(peagle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert "--max-num-batched-tokens" in peagle("serve", "--help").out


def test_the_bare_command_shows_the_commands(peagle):
    result = peagle()
    assert all(f" {command} " in result.out for command in COMMANDS)
    assert result.err == ""


def test_the_installed_command_is_this_one():
    script = Path(sys.executable).with_name("peagle")
    done = subprocess.run([script, "generate", "--wrong"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("peagle: no such option: --wrong")


def test_help_waits_for_no_model():
    """torch takes a second to import, and no command needs it before it has read its flags."""
    script = "import peagle.cli.app, sys; print({'torch', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_no_command_waits_for_torchs_compiler():
    """Which takes two seconds to import, and which only training and rare shapes need."""
    script = (
        "import peagle.llm, peagle.server.app, peagle.train.trainer, sys; "
        "print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


@pytest.mark.parametrize(("command", "turns"), [("serve", None), ("check", "10000")])
def test_only_a_server_keeps_cores_for_as_long_as_openmp_likes(peagle, monkeypatch, command, turns):
    monkeypatch.setenv("GOMP_SPINCOUNT", "")
    monkeypatch.delenv("GOMP_SPINCOUNT")
    peagle(command, "--help")
    assert os.environ.get("GOMP_SPINCOUNT") == turns


def test_ctrl_c_ends_with_a_word_and_code_130(peagle, pair, tmp_path, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("peagle.bench.load.drive", interrupted)
    out = tmp_path / "out.json"
    result = peagle("bench", "--target", pair.target, "--methods", "none", "--json", out)
    assert (result.code, result.err.strip()) == (130, "peagle: interrupted")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_a_command_begins(peagle, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("peagle.cli.app.app", interrupted)
    result = peagle("demo")
    assert (result.code, result.out, result.err) == (130, "", "peagle: interrupted\n")


def test_a_file_that_may_not_be_read_is_named_on_one_line(peagle, monkeypatch):
    """Whatever reads it: a supervisor does not start such a server again."""

    def closed(*arguments, **options):
        raise PermissionError(13, "Permission denied", "m/generation_config.json")

    monkeypatch.setattr("peagle.cli.app.app", closed)
    result = peagle("serve", "m")
    told = "peagle: [Errno 13] Permission denied: 'm/generation_config.json'\n"
    assert (result.code, result.out, result.err) == (2, "", told)


def test_a_defect_of_ours_is_not_dressed_up_as_the_users(peagle, pair, monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError

    monkeypatch.setattr("peagle.bench.load.drive", broken)
    with pytest.raises(ZeroDivisionError):
        peagle("bench", "--target", pair.target, "--methods", "none")

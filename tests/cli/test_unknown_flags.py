"""Flags under the names that vLLM or another command has for them."""

import pytest

from peagle.cli.unknown_flags import with_effect


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("generate --model m", "no such option: --model (here it is TARGET or --target)"),
        ("serve --model m", "no such option: --model (here it is TARGET or --target)"),
        ("serve t --model=m", "no such option: --model (here it is TARGET or --target)"),
        ("train r.yaml --model m", "no such option: --model (here it is --target)"),
        ("check d --num-speculative-tokens 3", "(here it is --k)"),
        ("generate --speculative-model d", "(here it is --drafter)"),
        ("bench --prompt x", "(here it is --prompts)"),
        ("bench --output x", "(here it is --json)"),
        ("generate --output x", "(an option of peagle regenerate)"),
        ("regenerate --max-num-seqs 3", "(here it is --concurrency)"),
        ("generate --concurrency 3", "(an option of peagle bench, peagle regenerate)"),
        ("check d --json", "(an option of peagle generate, peagle bench)"),
        ("--target t generate", "(it comes after the command, as in peagle demo --target)"),
        ("serve t --tensor-parallel-size 2", "peagle serve --engine vllm)"),
        ("generate --tensor-parallel-size 2", "peagle serve --engine vllm)"),
        ("serve t --enforce-eager", "--enforce-eager (a flag of vLLM's needs --engine vllm)"),
        ("serve t --generation-config vllm", "(a flag of vLLM's needs --engine vllm)"),
        ("bench --limt 2", "no such option: --limt (did you mean --limit?)"),
        ("generate -k 3", "no such option: -k (did you mean --k?)"),
    ],
)
def test_it_is_said_what_was_meant(peagle, line, hint):
    result = peagle(*line.split())
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("peagle: no such option: ")
    assert result.err.rstrip().endswith(hint)


def test_what_is_like_nothing_gets_no_hint(peagle):
    assert peagle("bench", "--xyzzy", 1).err == "peagle: no such option: --xyzzy\n"


def test_every_other_name_is_unknown_to_some_command_that_has_ours():
    """An entry that no command can reach explains nothing."""
    import typer

    from peagle.cli.app import app
    from peagle.cli.unknown_flags import OTHER_NAMES

    commands = typer.main.get_command(app).commands.values()
    flags = [{flag for one in command.params for flag in one.opts} for command in commands]
    for ours, others in OTHER_NAMES.items():
        for other in others:
            assert any(ours in own and other not in own for own in flags), (ours, other)


def test_flags_of_vllm_that_ask_for_what_happens_anyway_change_nothing():
    words = "--enable-auto-tool-choice --tensor-parallel-size 1 --trust-remote-code -tp 1"
    assert with_effect([*words.split(), "--generation-config=auto"]) == []
    for line in ("--tensor-parallel-size 2", "--generation-config=vllm", "--enable-lora", "x"):
        assert with_effect(line.split()) == line.split()

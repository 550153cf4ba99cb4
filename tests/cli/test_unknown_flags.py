"""Flags under the names that vLLM or another command has for them."""

import pytest


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("generate --model m", "no such option: --model (here it is TARGET or --target)"),
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
        ("generate --tensor-parallel-size 2", "(a flag of vLLM's, for peagle serve)"),
        ("serve t --kv-cache-dtipe fp8", "(did you mean --kv-cache-dtype?)"),
        ("serve t --flag-of-tomorrow", "(a flag of vLLM's needs --engine vllm)"),
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

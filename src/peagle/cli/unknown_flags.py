"""Flags that a command does not have: what they are called here, or who has them."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import typer

OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "--target": ("--model", "--target-model"),
    "--drafter": ("--speculative-model", "--draft-model"),
    "--k": ("--num-speculative-tokens",),
    "--prompts": ("--prompt", "--dataset-path"),
    "--json": ("--output", "--out", "--output-json", "--result-filename"),
    "--limit": ("--num-prompts",),
    "--concurrency": ("--max-concurrency", "--max-num-seqs", "--batch-size"),
    "--max-tokens": ("--max-new-tokens", "--output-len", "--random-output-len"),
    "--url": ("--base-url",),
    "--prompt-tokens": ("--input-len", "--random-input-len"),
    "--stop-token-id": ("--stop-token-ids",),
    "--kv-cache-memory": ("--kv-cache-memory-bytes",),
}
"""Our flags, each under its names in vLLM and in other commands of ours."""
MANY_DEVICES = "peagle's engine uses one device; vLLM's flags go through peagle serve --engine vllm"
BY_VLLM = "a flag of vLLM's needs --engine vllm"
ONLY_IN_VLLM: Mapping[str, str] = {
    "--tensor-parallel-size": MANY_DEVICES,
    "--pipeline-parallel-size": MANY_DEVICES,
    "--data-parallel-size": MANY_DEVICES,
    "--trust-remote-code": "no code of a model's directory is ever run",
}
WITHOUT_EFFECT: Mapping[str, tuple[str, ...]] = {
    "--enable-auto-tool-choice": (),
    "--trust-remote-code": (),
    "--async-scheduling": (),
    "--enable-chunked-prefill": (),
    "--disable-log-requests": (),
    "--no-enable-log-requests": (),
    "--tensor-parallel-size": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--data-parallel-size": ("1",),
    "-tp": ("1",),
    "--generation-config": ("auto",),
    "--kv-cache-dtype": ("auto",),
    "--load-format": ("auto", "safetensors"),
    "--tokenizer-mode": ("auto",),
}
"""vLLM's flags that ask for what happens anyway, with the values for which they do."""
CUTOFF = 0.75
"""How alike a flag must be to be suggested."""


def with_effect(words: Sequence[str]) -> list[str]:
    """The words of a command line without vLLM's flags that change nothing here."""
    left: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, given, value = word.partition("=")
        values = WITHOUT_EFFECT.get(flag)
        if values and not given and rest[:1] and rest[0] in values:
            rest.pop(0)
        elif values is None or bool(values) != bool(given) or (given and value not in values):
            left.append(word)
    return left


def unknown_flag(context: typer.Context, word: str) -> str:
    """What to say of a flag, perhaps with its value, that the context's command does not have."""
    flag = word.partition("=")[0]
    hint = (
        _here(context, flag)
        or ONLY_IN_VLLM.get(flag)
        or _elsewhere(context, flag)
        or _near(context, flag)
        or (BY_VLLM if context.info_name == "serve" else None)
    )
    return f"no such option: {flag}" + (f" ({hint})" if hint else "")


def _here(context: typer.Context, flag: str) -> str | None:
    """Its name in this command, if that takes a value too."""
    switches = [one for one in context.command.params if getattr(one, "is_flag", False)]
    own = set(_flags(context.command)) - {name for one in switches for name in one.opts}
    for name, others in OTHER_NAMES.items():
        if flag in others and name in own:
            return f"here it is {'TARGET or ' if _is_argument(context, name) else ''}{name}"
    return None


def _is_argument(context: typer.Context, name: str) -> bool:
    """Whether a flag's value may also be given as the command's TARGET."""
    arguments = {one.name for one in context.command.params if one.param_type_name == "argument"}
    return name == "--target" and "target" in arguments


def _elsewhere(context: typer.Context, flag: str) -> str | None:
    """The commands that have it."""
    commands: Mapping[str, Any] = getattr(context.find_root().command, "commands", {})
    having = [f"peagle {name}" for name, command in commands.items() if flag in _flags(command)]
    if not having:
        return None
    if context.command is context.find_root().command:
        return f"it comes after the command, as in {having[0]} {flag}"
    return f"an option of {', '.join(having)}"


def _near(context: typer.Context, flag: str) -> str | None:
    near = get_close_matches(flag, _flags(context.command), n=1, cutoff=CUTOFF)
    return f"did you mean {near[0]}?" if near else None


def _flags(command: Any) -> list[str]:
    return [flag for parameter in command.params for flag in parameter.opts]

"""Flags that a command does not have: what they are called here, or who has them."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from peagle.cli.vllm_flags import vllm_flags
from peagle.files import read_yaml

OTHER_NAMES: Mapping[str, Sequence[str]] = read_yaml(Path(__file__).with_name("other_names.yaml"))
"""Our flags, each under its names in vLLM, which `serve` takes, and in other commands of ours."""
BY_VLLM = "a flag of vLLM's needs --engine vllm"
FOR_SERVE = "a flag of vLLM's, for peagle serve"
CUTOFF = 0.75
"""How alike a flag must be to be suggested."""


def unknown_flag(context: typer.Context, word: str) -> str:
    """What to say of a flag, perhaps with its value, that the context's command does not have."""
    flag, serves = word.partition("=")[0], context.info_name == "serve"
    hint = (
        _here(context, flag)
        or _elsewhere(context, flag)
        or (FOR_SERVE if flag in vllm_flags() else None)
        or _near(context, flag, vllm_flags() if serves else ())
        or (BY_VLLM if serves else None)
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


def _near(context: typer.Context, flag: str, others: Iterable[str]) -> str | None:
    near = get_close_matches(flag, [*_flags(context.command), *others], n=1, cutoff=CUTOFF)
    return f"did you mean {near[0]}?" if near else None


def _flags(command: Any) -> list[str]:
    return [flag for parameter in command.params for flag in parameter.opts]

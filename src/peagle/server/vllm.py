"""`peagle serve --engine vllm`: the same checkpoint and flags on vLLM, for more than one GPU."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.errors import InputError
from peagle.files import read_yaml

TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))


def vllm_command(
    target: str,
    speculation: Mapping[str, Any] | None,
    flags: Mapping[str, Sequence[str]],
    further: Sequence[str],
) -> list[str]:
    """vLLM's command line. Raises `InputError` for flags that it does not have.

    speculation: what `--speculative-config` says. flags: ours that were given, with their values.
    further: arguments that only vLLM knows.
    """
    foreign = sorted(flags.keys() & TABLE["ours"])
    if foreign:
        raise InputError(f"{', '.join(foreign)}: not with --engine vllm")
    command = [_executable(), "serve", target]
    if speculation is not None:
        theirs = {key: value for key, value in speculation.items() if key not in TABLE["our_keys"]}
        command += ["--speculative-config", json.dumps(theirs, separators=(",", ":"))]
    for flag, values in flags.items():
        command += [TABLE["renamed"].get(flag, flag), *values]
    return [*command, *further]


def become(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Replace this process, so that signals reach vLLM itself."""
    os.execvpe(command[0], list(command), environment)


def _executable() -> str:
    """The vLLM of this Python's environment, which need not be activated; else the PATH's."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("vllm", path=beside) or shutil.which("vllm")
    if found is None:
        raise InputError(
            f"vllm is neither beside {sys.executable} nor on the PATH; install it there "
            "(pip install vllm) or activate its environment"
        )
    return found

"""Options that several commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from peagle.config import DType
from peagle.errors import ConfigError, InputError

Target = Annotated[
    str | None,
    typer.Option(help="Target model: directory or hub id.", show_default="the bundled one"),
]
Eagle3 = Annotated[
    str | None,
    typer.Option(help="EAGLE-3 drafter: directory or hub id.", show_default="the bundled one"),
]
Peagle = Annotated[
    str | None,
    typer.Option(help="P-EAGLE drafter: directory or hub id.", show_default="the bundled one"),
]
DTypeName = Annotated[
    DType, typer.Option("--dtype", help="auto is float32 on a CPU, bfloat16 on a GPU.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Threads = Annotated[int | None, typer.Option(help="CPU threads.", show_default="torch's choice")]


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads for the whole process, if one is given."""
    import torch

    if threads is None:
        return
    if threads < 1:
        raise InputError(f"--threads {threads}: give at least 1")
    torch.set_num_threads(threads)


@contextmanager
def from_flags(**renamed: str) -> Iterator[None]:
    """Let errors of a configuration made in the block name its flags.

    renamed: the flags whose names are not those of their keys.
    """

    def flag(key: str) -> str:
        field = key.partition(".")[0]
        return renamed.get(field, flag_name(field))

    try:
        yield
    except ConfigError as error:
        raise InputError(error.told(flag)) from None


def flag_name(parameter: str) -> str:
    """The flag of a command's parameter."""
    return "--" + parameter.replace("_", "-")

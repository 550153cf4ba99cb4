"""Options that several commands share."""

import os
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
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads.", show_default="OMP_NUM_THREADS, or 7 of every 8 cores"),
]
CORES_PER_SPARE = 8
"""One core in this many is left to others. All threads wait for the slowest one: with a thread on
each of 16 cores, one busy process beside them took 5/6 of the tokens; with 14 threads, none."""


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads for the whole process; None: leave some cores to others."""
    import torch

    if threads is not None and threads < 1:
        raise InputError(f"--threads {threads}: give at least 1")
    if threads is None:
        threads = torch.get_num_threads()
        if "OMP_NUM_THREADS" not in os.environ:
            threads -= threads // CORES_PER_SPARE
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

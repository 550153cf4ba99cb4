"""The `peagle` command: its subcommands and exit codes."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.core import TyperCommand

from peagle.cli import bench, check, demo, generate, regenerate, serve, train
from peagle.cli.groups import flattened
from peagle.cli.interrupts import INTERRUPTED
from peagle.cli.script import new_app
from peagle.cli.unknown_flags import unknown_flag
from peagle.errors import InputError
from peagle.installation import installed_version

INPUT_ERROR = 2
SPINS = "10000"
"""Turns for which a torch thread spins on its core while it waits for the others of a product.
libgomp's default is thirty times as many, during which another busy process waits for the core, and
then the engine for that process: 22 tokens/s beside such a process on two cores, and 135 with these
turns. A server keeps libgomp's: its event loop and clients take cores for microseconds all the
time, and with threads that sleep meanwhile its answers took 5 to 9 % longer."""

app = new_app(
    "Lossless speculative decoding with P-EAGLE drafters: see it, use it, measure it.",
    name="peagle",
    epilog="Begin with: peagle demo",
)


def _add(command: Callable[..., object], cls: type[TyperCommand] | None = None) -> None:
    """Add a command; its help ends with the examples in its module's doc, as they stand."""
    _, _, examples = (command.__globals__["__doc__"] or "").partition("\n\n")
    app.command(epilog=f"\b\n{examples}", cls=cls)(flattened(command))


_add(demo.demo)
_add(generate.generate)
_add(serve.serve, serve.ServeCommand)
_add(bench.bench)
_add(check.check)
_add(regenerate.regenerate)
_add(train.train)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peagle {installed_version()}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Options of `peagle` itself; the help is the application's."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 for bad input, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] != ["serve"]:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        code = app(given or ["--help"], prog_name="peagle", standalone_mode=False)
    except KeyboardInterrupt:  # before the command begins, which typer makes an exit of
        code = INTERRUPTED
    except (InputError, PermissionError) as error:
        return _end(str(error), INPUT_ERROR)
    except typer.TyperException as error:
        return _end(_misuse(error), INPUT_ERROR)
    return _end("interrupted", INTERRUPTED) if code == INTERRUPTED else code or 0


def _misuse(error: typer.TyperException) -> str:
    """What is wrong with a command line."""
    context, flag = getattr(error, "ctx", None), getattr(error, "option_name", None)
    if context is not None and flag is not None and hasattr(error, "possibilities"):
        return unknown_flag(context, flag)
    return error.format_message()


def _end(message: str, code: int) -> int:
    """Print on one line why it ends."""
    print("peagle:", *message.split(), file=sys.stderr)
    return code

"""The `peagle` command: its subcommands and exit codes."""

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from peagle.cli import bench, check, demo, generate, regenerate, serve, train
from peagle.cli.interrupts import INTERRUPTED
from peagle.errors import InputError

INPUT_ERROR = 2
SPINS = "10000"
"""Turns for which a torch thread spins on its core while it waits for the others of a product.
libgomp's default is thirty times as many, during which another busy process waits for the core, and
then the engine for that process: 22 tokens/s beside such a process on two cores, and 135 with these
turns. A server keeps libgomp's: its event loop and clients take cores for microseconds all the
time, and with threads that sleep meanwhile its answers took 5 to 9 % longer."""

app = typer.Typer(
    name="peagle",
    help="Lossless speculative decoding with P-EAGLE drafters: see it, use it, measure it.",
    epilog="Begin with: peagle demo",
    rich_markup_mode=None,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command(epilog=demo.EXAMPLE)(demo.demo)
app.command(epilog=generate.EXAMPLE)(generate.generate)
app.command(epilog=serve.EXAMPLE, context_settings=serve.SETTINGS)(serve.serve)
app.command(epilog=bench.EXAMPLE)(bench.bench)
app.command(epilog=check.EXAMPLE)(check.check)
app.command(epilog=regenerate.EXAMPLE)(regenerate.regenerate)
app.command(epilog=train.EXAMPLE)(train.train)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"peagle {version('peagle')}")
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
    if given[:1] == ["serve"]:
        given[1:] = serve.with_environment(given[1:], os.environ)
    else:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    try:
        code = app(given or ["--help"], prog_name="peagle", standalone_mode=False)
    except KeyboardInterrupt:  # before the command begins, which typer makes an exit of
        code = INTERRUPTED
    except InputError as error:
        return _end(str(error), INPUT_ERROR)
    except typer.TyperException as error:
        return _end(error.format_message(), INPUT_ERROR)
    if code == INTERRUPTED:
        return _end("interrupted", INTERRUPTED)
    return code or 0


def _end(message: str, code: int) -> int:
    """Print on one line why it ends."""
    print("peagle:", *message.split(), file=sys.stderr)
    return code

"""Applications and scripts of benchmarks/ as commands, with help and errors in plain text."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from peagle.errors import InputError


def run(main: Callable[..., Any]) -> None:
    """Run a script's function as a command; its help is the first line of the script.

    Wrong input is told in a line, after the script's name.
    """
    about = main.__globals__["__doc__"]
    app = new_app(about)
    app.command(help=_first_line(about))(main)
    try:
        app()
    except InputError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def new_app(about: str | None, **more: Any) -> typer.Typer:
    """An application without commands; its help is the first line of `about`.

    about: a script's docstring. more: what `typer.Typer` takes besides.
    """
    return typer.Typer(
        help=_first_line(about),
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **more,
    )


def _first_line(about: str | None) -> str:
    return (about or "").partition("\n")[0]

"""`peagle check`: what a drafter is and what is wrong with it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from peagle.cli.groups import group
from peagle.cli.options import one_of
from peagle.cli.tables import print_table
from peagle.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

    from peagle.drafters.diagnosis import Diagnosis

EXAMPLE = """\b
Examples:
  peagle check ./my-drafter
  peagle check ./my-drafter --target Qwen/Qwen3-0.6B"""
PROBLEMS_FOUND = 2


def _drafter(
    drafter: Annotated[
        str | None, typer.Argument(help="Drafter: directory or hub id.", show_default=False)
    ] = None,
    drafter_flag: Annotated[
        str | None, typer.Option("--drafter", help="The drafter, as a flag.")
    ] = None,
) -> str:
    given = one_of(drafter, drafter_flag, "drafter")
    if given is None:
        raise InputError("no drafter: give its directory or hub id")
    return given


CheckedDrafter = Annotated[str, group(_drafter)]


def check(
    *,
    drafter: CheckedDrafter,
    target: Annotated[
        str | None, typer.Option(help="Target that it should fit: directory or hub id.")
    ] = None,
    k: Annotated[
        int | None, typer.Option("--k", help="K that it should have been trained for.")
    ] = None,
) -> None:
    """Say what a drafter is and whether it fits its target.

    Facts go to stdout. Problems, each with its fix, go to stderr, one per line, and make the exit
    code 2.
    """
    from peagle.drafters.diagnosis import diagnose, target_problems
    from peagle.models.weights import model_directory

    if k is not None and k < 1:
        raise InputError(f"--k {k}: give at least 1")
    place = model_directory(drafter)
    beside = model_directory(target) if target is not None else None
    found = diagnose(place, beside)
    problems = [*found.problems, *_too_many(k, found)]
    problems += target_problems(beside) if beside is not None else ()
    _print_facts({"directory": str(place), **found.facts, **_answers(beside)})
    for problem in problems:
        typer.echo(f"problem: {' '.join(problem.split())}", err=True)
    if problems:
        raise typer.Exit(PROBLEMS_FOUND)
    typer.echo("no problem found" if target is None else f"no problem found; it fits {target}")


def _answers(target: "Path | None") -> dict[str, str]:
    """How the target's answers to conversations are read; nothing where that cannot be told."""
    from peagle.config import ChatConfig
    from peagle.dialects import find_dialect, told_dialect
    from peagle.models.tokenizer import load_tokenizer

    if target is None:
        return {}
    try:
        tokenizer, chat = load_tokenizer(target), ChatConfig()
        return {"answers": told_dialect(find_dialect(tokenizer, chat), tokenizer, chat)}
    except InputError:  # told among the problems
        return {}


def _too_many(k: int | None, found: "Diagnosis") -> Iterable[str]:
    """That K is more than the drafter was trained for."""
    trained = found.config.trained_tokens if found.config is not None else None
    if k is not None and trained is not None and k > trained:
        yield (
            f"K = {k} is beyond the {trained} tokens that it was trained for; give --k {trained} "
            "at most"
        )


def _print_facts(facts: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    for label, value in facts.items():
        table.add_row(f"[dim]{label}[/]", escape(value))
    print_table(Console(highlight=False), table)

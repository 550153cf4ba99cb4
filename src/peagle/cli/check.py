"""`peagle check`: what a drafter is and what is wrong with it."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

EXAMPLE = """\b
Examples:
  peagle check ./my-drafter
  peagle check ./my-drafter --target Qwen/Qwen3-0.6B"""
PROBLEMS_FOUND = 2


def check(
    drafter: Annotated[str, typer.Argument(help="Drafter: directory or hub id.")],
    target: Annotated[
        str | None, typer.Option(help="Target that it should fit: directory or hub id.")
    ] = None,
) -> None:
    """Say what a drafter is and whether it fits its target.

    Facts go to stdout. Problems, each with its fix, go to stderr, one per line, and make the exit
    code 2.
    """
    from peagle.drafters.diagnosis import diagnose, target_problems
    from peagle.models.weights import model_directory

    place = model_directory(drafter)
    beside = model_directory(target) if target is not None else None
    found = diagnose(place, beside)
    problems = [*found.problems, *(target_problems(beside) if beside is not None else ())]
    _print_facts({"directory": str(place), **found.facts})
    for problem in problems:
        typer.echo(f"problem: {' '.join(problem.split())}", err=True)
    if problems:
        raise typer.Exit(PROBLEMS_FOUND)
    typer.echo("no problem found" if target is None else f"no problem found; it fits {target}")


def _print_facts(facts: dict[str, str]) -> None:
    table = Table.grid(padding=(0, 2))
    for label, value in facts.items():
        table.add_row(f"[dim]{label}[/]", value)
    Console(soft_wrap=True).print(table)

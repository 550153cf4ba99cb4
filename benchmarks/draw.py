"""A report of each result: a page with plots, its Markdown, and its figures as CSV.

    python benchmarks/draw.py [RESULT ...] --out build/reports   (all: `make reports`)

RESULT is a name of `benchmarks/results`, or a file that a script beside this one has written.
"""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peagle.bench.advice import Price
from peagle.bench.report.contents import what_ran
from peagle.bench.report.document import Block, Page, Table, Text
from peagle.bench.report.report import Report, csv_text
from peagle.bench.tables import case_text, full_table
from peagle.cli.script import run
from peagle.cli.tables import print_table
from records.bench import drawn_failures, drawn_runs, environment_of
from records.result import Result
from records.store import RESULTS, read, read_all


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Results; all, if none is named.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the reports.")] = Path("build/reports"),
) -> None:
    """Write a directory for each result, and name it."""
    chosen = [RESULTS / f"{name}.json" if "." not in name else Path(name) for name in names or ()]
    results = {path.stem: read(path) for path in chosen} if chosen else read_all()
    for name, result in results.items():
        write_report(result, out / name)
        print(out / name)


def write_report(result: Result, place: Path) -> None:
    """Draw one result."""
    report = Report(place, Price(), shlex.join(["python", *sys.argv]))
    about, failures = environment_of(result), drawn_failures(result)
    with report.directory():
        if runs := drawn_runs(result):
            report.write(about, runs, (*result.notes, *result.doubts), failures)
        else:
            report.write_document(_listed(result, report.command), csv_text(_entries(result)))


def show(result: Result) -> None:
    """Print a result's speeds, and what failed."""
    if runs := drawn_runs(result):
        print_table(Console(highlight=False), full_table(runs))
    print(*result.notes, sep="\n")
    for failure in drawn_failures(result):
        print(f"{case_text(failure.case)} failed: {failure.reason}")


def _entries(result: Result) -> list[dict[str, object]]:
    """Its rows, or its runs of which only acceptance was counted."""
    counted = [one.model_dump(exclude_defaults=True) for one in result.runs]
    return [*map(dict, result.rows), *counted]


def _listed(result: Result, command: str) -> Page:
    """Rows as a table; those columns come first that say which row it is."""
    entries = _entries(result)
    names = list(dict.fromkeys(name for entry in entries for name in entry))
    names.sort(key=lambda name: name in result.units)
    head = [name.replace("_", " ") for name in names]
    head = [
        f"{told}, {result.units[name]}" if name in result.units else told
        for name, told in zip(names, head, strict=True)
    ]
    rows = [[_told(entry.get(name)) for name in names] for entry in entries]
    table: list[Block] = [Table(head, rows, keys=sum(name not in result.units for name in names))]
    notes = [Text(note, warns=True) for note in (*result.notes, *result.doubts)]
    last = Text(f"Made by: {command}")
    return Page(result.measured, [*notes, *table, *what_ran(environment_of(result)), last])


def _told(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_told, value))
    return f"{value:,.4g}" if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    run(main)

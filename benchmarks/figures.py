"""The tables of README and docs, and the index of results, made anew from the results.

    python benchmarks/figures.py           (`make figures`)
    python benchmarks/figures.py --check   names what is not current, and ends with 1

`benchmarks/tables/*.yaml` says what each table shows; a page has it between two markers.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.script import run
from records.pages import ROOT, newer, pages, read_tables, renewed
from records.store import INDEX, RESULTS, index, read_all


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing.")] = False,
) -> None:
    """Write what is not current, and name it; the exit code is 1 if a result is newer."""
    found = list(stale())
    for path, text in found:
        print(path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    late = newer(read_tables(), read_all(), (page.read_text(encoding="utf-8") for page in pages()))
    for name in late:
        print(f"{name} is newer than the tables of its claim: show it, or name it on a page")
    raise typer.Exit(1 if late or (check and found) else 0)


def stale() -> Iterator[tuple[Path, str]]:
    """Each page that is not what the results make of it, and what they make of it."""
    results, tables = read_all(), read_tables()
    listed = RESULTS / INDEX
    wanted = {page: renewed(page.read_text(encoding="utf-8"), tables, results) for page in pages()}
    for path, text in {**wanted, listed: index(results)}.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            yield path, text


if __name__ == "__main__":
    run(main)

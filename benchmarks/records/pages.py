"""Tables between a page's markers, made of results.

A page has `<!-- table NAME -->` and `<!-- /table -->`; what stands between them is the table NAME
of `benchmarks/tables/*.yaml`: its rows and columns with the values that tell a run or a row from
all others, and the template of its cells. The figures' names are the methods of `cells.RunFigures`,
or the columns of a result's rows.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError

from peagle.errors import InputError
from records.cells import filled, find
from records.result import Strict
from records.store import Results
from records.support import support

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "benchmarks" / "tables"
MARKED = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- /table -->)", re.DOTALL)
SUPPORT = "support"
"""The table that is made from the families too."""
SHOW = "show"
Wanted = dict[str, Any]
"""Values that a run or row must have; under `SHOW` the template of the cell."""


class Table(Strict):
    """A table of a page."""

    corner: str = ""
    """The head of the column of labels."""
    of: Wanted = {}
    """What every cell asks for."""
    rows: dict[str, Wanted] = Field(min_length=1)
    columns: dict[str, Wanted] = Field(min_length=1)
    missing: str = ""
    """What stands where nothing was measured."""


def pages() -> list[Path]:
    """Every page that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def read_tables(place: Path = TABLES) -> dict[str, Table]:
    """All tables by name. Raises `InputError` for what is no table."""
    found: dict[str, Table] = {}
    for path in sorted(place.glob("*.yaml")):
        for name, values in (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).items():
            try:
                found[name] = Table.model_validate(values)
            except ValidationError as error:
                raise InputError(f"{path}: {name}: {error.errors()[0]['msg']}") from None
    return found


def renewed(text: str, tables: Mapping[str, Table], results: Results) -> str:
    """A page with its tables made anew. Raises `InputError` for one that is not known."""

    def one(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name == SUPPORT:
            return f"{begin}\n{support(results)}\n{end}"
        if name not in tables:
            raise InputError(f"there is no table {name}")
        return f"{begin}\n{drawn(name, tables[name], results)}\n{end}"

    return MARKED.sub(one, text)


def drawn(name: str, table: Table, results: Results) -> str:
    """A table as Markdown. Raises `InputError` where a cell cannot be told from another."""
    head = [table.corner, *(column.strip() for column in table.columns)]
    marks = ["---", *("--:" for _ in table.columns)]
    rows = []
    for label, cells in asked(name, table):
        found = ((find(results, wanted), show) for wanted, show in cells)
        rows.append(
            [label, *(filled(show, one, results) if one else table.missing for one, show in found)]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, marks, *rows))


def asked(name: str, table: Table) -> Iterator[tuple[str, list[tuple[Wanted, str]]]]:
    """Each row's label, and for each of its cells the values that it asks for and its template."""
    for row, of_row in table.rows.items():
        cells = []
        for column, of_column in table.columns.items():
            wanted = {**table.of, **of_column, **of_row}
            if SHOW not in wanted:
                raise InputError(f"table {name}: {row}, {column} has no {SHOW}")
            cells.append((wanted, wanted.pop(SHOW)))
        yield row.strip(), cells


def newer(tables: Mapping[str, Table], results: Results, texts: Iterable[str]) -> list[str]:
    """Results that hold today, of a claim that tables show, which no table shows and no page names.

    Such a result is one that was added after the tables that show its claim were written.
    """
    cells = [
        wanted
        for name, table in tables.items()
        for _, row in asked(name, table)
        for wanted, _ in row
    ]
    shown = {one.name for wanted in cells if (one := find(results, wanted))}
    claims = {results[name].claim for name in shown}
    written = "".join(texts)
    return [
        name
        for name, result in results.items()
        if result.claim in claims and result.superseded_by is None
        if name not in shown and f"{name}.json" not in written
    ]

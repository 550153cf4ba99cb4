"""Rows of figures that are no runs of `peagle bench`, as a report."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from told import SYNTHETIC, report_in

from peagle.bench.pair import NAMES
from peagle.bench.report.contents import what_ran
from peagle.bench.report.document import Document, Table, Text
from peagle.bench.report.report import csv_text


@dataclass(frozen=True)
class Listed:
    """Rows, and what they depend on."""

    environment: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    @property
    def figures(self) -> str:
        """All of them, as CSV."""
        return csv_text(self.rows)

    def write(self, place: Path) -> None:
        """Write the report."""
        report = report_in(place)
        report.write_document(self._document(report.command), self.figures)

    def show(self) -> None:
        """Print it."""
        for row in self.rows:
            print(json.dumps(row))

    def _document(self, command: str) -> Document:
        about = self.environment
        title = f"{about['shape']}, {NAMES[about['method']]}, measured {about['date']}"
        blocks = [Text(SYNTHETIC, warns=True), self._table(), *what_ran(about)]
        return Document(title, [*blocks, Text(f"Made by: {command}")])

    def _table(self) -> Table:
        """Its first columns, which say what was measured, are those without fractions."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        keys = [name for name in names if not isinstance(self.rows[0].get(name), (float, list))]
        head = [name.replace("_", " ") for name in names]
        rows = [[_text(row.get(name)) for name in names] for row in self.rows]
        return Table(head, rows, keys=len(keys))


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return f"{value:,}" if isinstance(value, (int, float)) else str(value or "-")

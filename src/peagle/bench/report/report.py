"""A report's directory: page, Markdown, plots, the table of all figures."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle.bench.advice import Price
from peagle.bench.report.contents import contents
from peagle.bench.report.document import Page, Plots
from peagle.bench.report.pages import html_page, markdown_page
from peagle.bench.runs import Failure, Run
from peagle.bench.verdict import speed_up
from peagle.files import writing


@dataclass(frozen=True)
class Report:
    """Where a report goes, and what it needs to know beside figures."""

    place: Path
    price: Price
    command: str
    """That made it."""

    @property
    def page(self) -> Path:
        """Its HTML page."""
        return self.place / "index.html"

    @contextmanager
    def directory(self) -> Iterator[None]:
        """Make its directory, which is gone after the block if it is still empty.

        Raises `InputError` where it cannot be made.
        """
        with writing(self.place):
            self.place.mkdir(parents=True, exist_ok=True)
        try:
            yield
        finally:
            with suppress(OSError):
                self.place.rmdir()

    def write(
        self,
        environment: Mapping[str, Any],
        runs: Sequence[Run],
        notes: Sequence[str],
        failures: Sequence[Failure] = (),
    ) -> None:
        """Write all files of a report on median runs. Raises `OSError`."""
        document = contents(environment, runs, notes, failures, self.price, self.command)
        self.write_document(document, figures(runs))

    def write_document(self, document: Page, table: str) -> None:
        """Write all files of a report; table: its figures, as CSV. Raises `OSError`."""
        files = {
            "index.html": html_page(document),
            "report.md": markdown_page(document),
            "figures.csv": table,
            **_drawings(document),
        }
        for name, text in files.items():
            (self.place / name).write_text(text, encoding="utf-8", newline="")


def _drawings(document: Page) -> dict[str, str]:
    rows = [block.plots for block in document.blocks if isinstance(block, Plots)]
    return {plot.name: plot.svg for plots in rows for plot in plots}


def figures(runs: Sequence[Run]) -> str:
    """Every figure of every case as CSV, a row a case."""
    return csv_text([{**run.as_json(), **_gain(run, runs)} for run in runs])


def _gain(run: Run, runs: Sequence[Run]) -> dict[str, float]:
    ratio = speed_up(run, runs)
    if ratio is None:
        return {}
    bounds = {"speed_up_low": ratio.low, "speed_up_high": ratio.high} if ratio.bounded else {}
    return {"speed_up": ratio.median, **bounds}


def csv_text(entries: Sequence[Mapping[str, Any]]) -> str:
    """Entries of a result file as CSV, a row each."""
    rows = [_flat(entry) for entry in entries]
    names = list(dict.fromkeys(name for row in rows for name in row))
    sink = io.StringIO()
    writer = csv.DictWriter(sink, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return sink.getvalue()


def _flat(entry: Mapping[str, Any]) -> dict[str, Any]:
    """A column for each number; several numbers are separated by spaces."""
    row: dict[str, Any] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            row |= {f"{name}_{part}": number for part, number in value.items()}
        elif isinstance(value, (tuple, list)):
            row[name] = " ".join(f"{number:.7g}" for number in value)
        else:
            row[name] = value
    return row

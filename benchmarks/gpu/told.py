"""What a report tells, whichever script measured it: written, and shown in the terminal."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle.bench.advice import Price
from peagle.bench.case import Case
from peagle.bench.measures import NOT_MEASURED, Measures, Percentiles
from peagle.bench.report.report import Report, figures
from peagle.bench.runs import Failure, Run
from peagle.bench.tables import case_text, full_table
from peagle.cli.tables import print_table

SYNTHETIC = "SYNTHETIC: random weights, acceptance length (AL) given; only the times mean anything."


@dataclass(frozen=True)
class Told:
    """Median runs, what they depend on, and what a reader must know."""

    environment: Mapping[str, Any]
    runs: Sequence[Run]
    notes: Sequence[str] = ()
    failures: Sequence[Failure] = ()

    @property
    def figures(self) -> str:
        """All of them, as CSV."""
        return figures(self.runs)

    def write(self, place: Path) -> None:
        """Write the report, once there is a figure."""
        if self.runs:
            report_in(place).write(self.environment, self.runs, self.notes, self.failures)

    def show(self) -> None:
        """Print the table, and what failed."""
        if self.runs:
            table, keys = full_table(self.runs)
            print_table(Console(highlight=False), table, keys=keys)
        for text in filter(None, (self.environment.get("synthetic"), *self.notes)):
            print(text)
        for failure in self.failures:
            print(f"{case_text(failure.case)} failed: {failure.reason}")


def report_in(place: Path) -> Report:
    """A report that this process makes, in a directory."""
    place.mkdir(parents=True, exist_ok=True)
    return Report(place, Price(), shlex.join(["python", *sys.argv]))


def run_of(case: Case, entry: Mapping[str, Any]) -> Run:
    """A run from its entry of a result file, which may lack what its engine does not tell."""
    found = Measures(
        otps=entry["otps"],
        acceptance_length=entry.get("acceptance_length"),
        acceptance_rate_per_position=tuple(entry.get("acceptance_rate_per_position", ())),
        ttft_ms=_times(entry, "ttft_ms"),
        itl_ms=_times(entry, "itl_ms"),
        e2e_ms=_times(entry, "e2e_ms"),
        output_tokens=entry.get("output_tokens", 0),
        acceptance_length_interval=entry.get("acceptance_length_interval"),
        tokens_per_cycle=entry.get("tokens_per_cycle"),
    )
    return Run(
        case,
        found,
        (),
        entry.get("same_text"),
        tuple(entry["rounds"]),
        entry.get("core_share"),
        entry.get("failed", 0),
        entry.get("branches", False),
    )


def _times(entry: Mapping[str, Any], name: str) -> Percentiles:
    return Percentiles(**entry[name]) if name in entry else NOT_MEASURED


def shared(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several parts; all values of one, where parts differ."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _joined([part[name] for part in parts if name in part]) for name in names}


def _joined(values: Sequence[Any]) -> Any:
    different = [value for place, value in enumerate(values) if value not in values[:place]]
    if len(different) == 1:
        return different[0]
    if all(isinstance(value, Mapping) for value in different):
        return shared(different)
    return ", ".join(map(str, different))


def days(parts: Sequence[Mapping[str, Any]]) -> str:
    """When some parts were measured: "2026-11-25", or "2026-11-23 to 2026-11-25"."""
    found = sorted(part["date"][:10] for part in parts if "date" in part)
    return " to ".join(dict.fromkeys((found[0], found[-1])))

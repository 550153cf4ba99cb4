"""A result while it is measured: what it depends on, and its file, which grows with it."""

import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle.bench.case import OURS
from peagle.bench.environment import hardware, machine
from peagle.files import rewritten_file
from records.bench import machine_of, measured_commit
from records.result import Result, Row
from records.store import text_of


def begun(measured: str, card: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The facts of a result that begins now, on this machine, by this command.

    card: its reading, with which no context of this process is opened on it.
    """
    device = {} if card else hardware("auto", "auto")
    facts = {**machine(), **device, "card": dict(card or {})}
    return {
        "measured": measured,
        "date": facts["date"],
        "command": shlex.join(["python", *sys.argv]),
        "commit": measured_commit(),
        "machine": machine_of(facts),
        "versions": {OURS: facts["versions"]},
    }


@contextmanager
def written(
    out: Path | None, about: Mapping[str, Any], units: Mapping[str, str], **setting: Any
) -> Iterator[Callable[[Sequence[Row]], None]]:
    """A function that writes a result with all rows so far; without a path nothing is written.

    about: of `begun`; units: of all columns that there may be. Raises `InputError` when the file
    cannot be written.
    """

    def result(rows: Sequence[Row]) -> Result:
        names = {name for row in rows for name in row}
        known = {name: unit for name, unit in units.items() if name in names}
        return Result(**about, units=known, setting=setting, rows=tuple(rows))

    if out is None:
        yield lambda rows: None
        return
    with rewritten_file(out) as write:
        yield lambda rows: write(text_of(result(rows)))

"""The flags of a report."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.errors import InputError, lacking

if TYPE_CHECKING:
    from peagle.bench.report.report import Report


@dataclass(frozen=True)
class Reporting:
    """The flags as given. Raises `InputError` for a price or a rate that cannot be."""

    report: Annotated[
        Path | None,
        typer.Option(
            help="Write a report into this directory: HTML, Markdown, CSV.", show_default="none"
        ),
    ] = None
    price_per_hour: Annotated[
        float | None,
        typer.Option(help="What the machine costs an hour, for the report.", show_default="none"),
    ] = None
    target_rate: Annotated[
        float | None,
        typer.Option(help="Tokens/s that are needed, for the report.", show_default="none"),
    ] = None

    def __post_init__(self) -> None:
        given = {"--price-per-hour": self.price_per_hour, "--target-rate": self.target_rate}
        for flag, value in given.items():
            if value is not None and not (0.0 < value < math.inf):
                raise InputError(f"{flag} {value:g}: give a number above 0")
            if value is not None and self.report is None:
                raise InputError(f"{flag} is for the report; add --report DIR")

    def report_into(self, force: bool) -> "Report | None":
        """The report, if one is asked for.

        Raises `InputError` for a directory that exists, unless its files may be replaced.
        """
        if self.report is None:
            return None
        place = self.report.expanduser()
        if place.exists() and not force:
            raise InputError(f"{place} exists; give another name, or --force to replace its files")
        try:
            import matplotlib  # noqa: F401 (a long run learns now that it cannot draw)
        except ImportError:
            raise InputError(lacking("--report needs matplotlib", "report")) from None
        from peagle.bench.advice import Price
        from peagle.bench.report.report import Report

        command = shlex.join(["peagle", *sys.argv[1:]])
        return Report(place, Price(self.price_per_hour, self.target_rate), command)

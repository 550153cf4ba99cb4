"""The flags of what a measurement writes beside the terminal."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from peagle.cli.groups import Flags, Positive
from peagle.errors import InputError, lacking
from peagle.files import STDOUT, refuse_existing

if TYPE_CHECKING:
    from peagle.bench.report.report import Report


class Reporting(Flags):
    """The flags as given."""

    report: Path | None = None
    """Write a report into this directory: HTML, Markdown, CSV."""
    price_per_hour: Positive | None = None
    """What the machine costs an hour, for the report."""
    target_rate: Positive | None = None
    """Tokens/s that are needed, for the report."""
    result: Path | None = Field(None, alias="json")
    """Write the result to this file; - is stdout."""
    force: bool = False
    """Replace the files of --json and --report."""

    def model_post_init(self, _: Any) -> None:
        for name in ("price_per_hour", "target_rate"):
            if self.report is None and getattr(self, name) is not None:
                raise InputError(f"--{name.replace('_', '-')} is for the report; add --report DIR")
        if str(self.result).startswith("--"):  # the flag that follows it
            raise InputError("--json needs a FILE, or - for stdout; peagle generate's needs none")

    def open(self) -> "Report | None":
        """The report, if one is asked for.

        Raises `InputError` for what exists, unless its files may be replaced.
        """
        if self.result is not None and self.result != STDOUT:
            refuse_existing(self.result, self.force)
        if self.report is None:
            return None
        place = Path(os.path.expanduser(self.report))
        if os.path.exists(place) and not self.force:
            raise InputError(f"{place} exists; give another name, or --force to replace its files")
        try:
            import matplotlib  # noqa: F401 (a long run learns now that it cannot draw)
        except ImportError:
            raise InputError(lacking("--report needs matplotlib", "report")) from None
        from peagle.bench.advice import Price
        from peagle.bench.report.report import Report

        command = shlex.join(["peagle", *sys.argv[1:]])
        return Report(place, Price(self.price_per_hour, self.target_rate), command)

"""Standard output that says in a line why it cannot be written, and that can hold any text."""

import contextlib
import io
import os
import sys
from typing import Any

from peagle.errors import InputError


class _Stdout(io.FileIO):
    """Raises `InputError` where the disk is full; typer ends quietly after a broken pipe."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            # what is left, which Python writes at its end, goes nowhere
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            raise InputError(f"stdout cannot be written: {error.strerror}") from None


def flush() -> None:
    """Write what is left. Raises `InputError` where the disk is full."""
    if sys.stdout is not None:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()


def install() -> None:
    """Replace `sys.stdout`; what its encoding does not have is written as an escape."""
    before = sys.stdout
    if before is not None:
        sys.stdout = io.TextIOWrapper(
            io.BufferedWriter(_Stdout(before.fileno(), "w", closefd=False)),
            encoding=before.encoding,
            errors="backslashreplace" if before.errors == "strict" else before.errors,
            line_buffering=before.isatty(),
        )

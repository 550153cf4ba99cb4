"""The file of finished conversations, which a later run continues."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from peagle.errors import InputError

BEGINNING = b'{"source": "'
"""Of every line."""


class Output:
    """One line a finished conversation, each on its way to the disk when `write` returns."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file = path, file
        self.done = self._read_sources()
        """The sources of the conversations in it."""

    def write(self, record: dict[str, Any]) -> None:
        """Add a conversation. Raises `InputError` when the disk does not take it."""
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise InputError(f"{self._path} cannot be written: {error.strerror}") from None
        self.done.add(record["source"])

    def _read_sources(self) -> set[str]:
        """What is there already; a last line that was not finished is taken away."""
        found, kept = set(), 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                place = f"{self._path}:{number}"
                if line.endswith(b"\n"):
                    found.add(_source(line, place))
                    kept += len(line)
                elif not found and line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                    raise _foreign(place)
        self._file.truncate(kept)
        return found


@contextmanager
def open_output(path: Path) -> Iterator[Output]:
    """The file, new or continued.

    Raises `InputError` when it cannot be written or holds lines of another kind.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} cannot be written: it is no file")
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        yield Output(path, file)


def _source(line: bytes, place: str) -> str:
    try:
        match json.loads(line):
            case {"source": str(source)}:
                return source
    except ValueError:
        pass
    raise _foreign(place)


def _foreign(place: str) -> InputError:
    return InputError(f"{place}: not a line that peagle regenerate wrote; give another --output")

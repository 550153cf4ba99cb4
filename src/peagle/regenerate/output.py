"""The file of finished conversations, which a later run continues."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from peagle.errors import InputError


class Output:
    """One line a finished conversation, each written at once."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self._path, self._file = path, file
        self.done = self._read_sources()
        """The sources of the conversations in it."""

    def write(self, record: dict[str, Any]) -> None:
        """Add a conversation. Raises `InputError` when the disk does not take it."""
        try:
            self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise InputError(f"{self._path} cannot be written: {error.strerror}") from None
        self.done.add(record["source"])

    def _read_sources(self) -> set[str]:
        """What is there already; a last line that was not finished is taken away."""
        found, kept = set(), 0
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            if line.endswith(b"\n"):
                found.add(_source(line, f"{self._path}:{number}"))
                kept += len(line)
        self._file.truncate(kept)
        return found


@contextmanager
def open_output(path: Path) -> Iterator[Output]:
    """The file, new or continued.

    Raises `InputError` when it cannot be written or holds lines of another kind.
    """
    try:
        file = path.open("a+b")
    except OSError as error:
        reason = error.strerror or "it is no file"
        raise InputError(f"{path} cannot be written: {reason}") from None
    with file:
        yield Output(path, file)


def _source(line: bytes, place: str) -> str:
    try:
        match json.loads(line):
            case {"source": str(source)}:
                return source
    except ValueError:
        pass
    raise InputError(f"{place}: not a line that peagle regenerate wrote; give another --output")

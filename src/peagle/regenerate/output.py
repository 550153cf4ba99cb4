"""The file of finished conversations, which a later run continues."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from peagle.errors import InputError

BEGINNING = b'{"source": "'
"""How every line begins."""


class Output:
    """One line per finished conversation, handed to the system before `write` returns."""

    def __init__(self, path: Path, file: FileIO, by: str, with_ids: bool) -> None:
        self._path, self._file, self._by, self._with_ids = path, file, by, with_ids
        self.done = self._read_questions()
        """Digests of the questions of the conversations in the file."""

    def write(self, asked: str, source: str, record: dict[str, Any]) -> None:
        """Add a conversation. Raises `InputError` when it cannot be written."""
        whole = {"source": source, "asked": asked, "by": self._by, **record}
        line = json.dumps(whole, ensure_ascii=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise InputError(f"{self._path} cannot be written: {error.strerror}") from None
        self.done.add(asked)

    def _read_questions(self) -> set[str]:
        """Digests of what is already there; removes an unfinished last line."""
        found, kept = set(), 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                place = f"{self._path}:{number}"
                if line.endswith(b"\n"):
                    found.add(self._question(line, place))
                    kept += len(line)
                elif not found and line[: len(BEGINNING)] != BEGINNING[: len(line)]:
                    raise _foreign(place)
        self._file.truncate(kept)
        return found

    def _question(self, line: bytes, place: str) -> str:
        match _parsed(line):
            case {"source": str(), "asked": str(asked), "by": self._by, **record}:
                if self._with_ids and not _has_ids(record):
                    raise InputError(
                        f"{place}: its answers have no token ids; an earlier peagle regenerate or "
                        "an endpoint wrote them; give another --output"
                    )
                return asked
            case {"source": str(), "asked": str(), "by": str(by)}:
                raise InputError(
                    f"{place}: answered by {by}, not by {self._by}; give another --output, or the "
                    "same model and sampling parameters"
                )
            case {"source": str(), "messages": list()} | {"source": str(), "response": str()}:
                raise InputError(
                    f"{place}: written by an earlier peagle regenerate, which did not record what "
                    "was asked; give another --output"
                )
        raise _foreign(place)


@contextmanager
def open_output(path: Path, by: str, with_ids: bool) -> Iterator[Output]:
    """The file, new or continued, of answers by `by`: a model and how it is sampled.

    with_ids: whether every answer comes with its token ids. Raises `InputError` when it cannot be
    written, holds answers by another model or sampling or without their ids, or has lines of
    another kind. A new file into which nothing was written is removed.
    """
    if path.exists() and not path.is_file():
        raise InputError(f"{path} cannot be written: it is not a file")
    if path.suffix == ".gz":
        raise InputError(f"{path}: answers are not compressed; leave out .gz")
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no directory {path.parent}")
    new = not path.exists()
    try:
        file = path.open("ab", buffering=0)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    with file:
        try:
            yield Output(path, file, by, with_ids)
        finally:
            if new and not os.fstat(file.fileno()).st_size:
                path.unlink(missing_ok=True)


def _has_ids(record: Mapping[Any, Any]) -> bool:
    """Whether an answer in a record has its token ids."""
    messages = record.get("messages")
    told = [record, *messages] if isinstance(messages, list) else [record]
    return any(isinstance(one, dict) and "token_ids" in one for one in told)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _foreign(place: str) -> InputError:
    return InputError(f"{place}: not a line written by peagle regenerate; give another --output")

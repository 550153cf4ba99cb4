"""Files of JSON lines that a later run continues, and the one of finished conversations."""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peagle.configuration import parsed
from peagle.errors import InputError
from peagle.files import writing

VARIABLES = "chat_template_kwargs"
"""A line's variables of the chat template, which training gives it, too."""
BEGINNING = '{"source": "'
"""How every line of an output begins."""


def read_lines(path: Path, beginning: str) -> Iterator[tuple[str, Any]]:
    """The place and the value of each line of a file, if there is one; None for what is no JSON.

    Once all are read, an unfinished last line is removed. beginning: how every line begins. Raises
    `InputError` for a file that cannot be written or has no such line.
    """
    kept = 0
    with writing(path):
        if not path.exists() and os.access(path.parent, os.W_OK):
            return
        with path.open("ab+") as lines:  # which tells why a new file cannot be made
            lines.seek(0)
            for number, line in enumerate(lines, start=1):
                place = f"{path}:{number}"
                if line.endswith(b"\n"):
                    yield place, parsed(line)
                    kept += len(line)
                elif not kept and line[: len(beginning)] != beginning.encode()[: len(line)]:
                    yield place, None
            lines.truncate(kept)


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Add a line, which the system then has. Raises `InputError` when it cannot be written."""
    with writing(path), path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, ensure_ascii=False) + "\n")


class Output:
    """The file, new or continued, of answers by `by`: a model and how it is sampled.

    with_ids: whether every answer comes with its token ids; variables: the chat template's, which
    training gives it, too. Raises `InputError` when it cannot be written, holds answers by another
    model or sampling or without their ids, or has lines of another kind.
    """

    def __init__(
        self, path: Path, by: str, with_ids: bool, variables: Mapping[str, Any] | None = None
    ) -> None:
        if path.suffix == ".gz" or str(path) in ("-", "/dev/stdout", "/dev/stderr"):
            raise InputError(f"{path}: answers go to a plain file, from which a run goes on")
        self._path, self._by, self._with_ids = path, by, with_ids
        self._shown = {VARIABLES: variables} if variables else {}
        lines = read_lines(path, BEGINNING)
        self.done = {self._question(found, place) for place, found in lines}
        """Digests of the questions of the conversations in the file."""

    def write(self, asked: str, source: str, record: dict[str, Any]) -> None:
        """Add a conversation, with all variables of its template. Raises `InputError` when it
        cannot be written."""
        told = {"source": source, "asked": asked, "by": self._by}
        append(self._path, {**told, **self._shown, **record})
        self.done.add(asked)

    def _question(self, found: Any, place: str) -> str:
        match found:
            case {"source": str(), "asked": str(asked), "by": self._by, **record}:
                if self._with_ids and not _has_ids(record):
                    raise InputError(
                        f"{place}: its answers have no token ids; an endpoint wrote them; give "
                        "another --output"
                    )
                return asked
            case {"source": str(), "asked": str(), "by": str(by)}:
                raise InputError(
                    f"{place}: answered by {by}, not by {self._by}; give another --output, or the "
                    "same model and sampling parameters"
                )
        raise InputError(f"{place}: not a line written by peagle regenerate; give another --output")


def _has_ids(record: Mapping[Any, Any]) -> bool:
    """Whether an answer in a record has its token ids."""
    messages = record.get("messages")
    told = [record, *messages] if isinstance(messages, list) else [record]
    return any(isinstance(one, dict) and "token_ids" in one for one in told)

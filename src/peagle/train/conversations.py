"""Documents -> packed rows: tokens, which document each belongs to, which are responses."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.errors import InputError

Encode = Callable[[str], list[int]]
PADDING = -1


@dataclass(frozen=True)
class Document:
    """A prompt and the target's answer, as token ids."""

    tokens: tuple[int, ...]
    prompt_length: int
    """Tokens that are context only; the drafter is charged for the others."""


@dataclass(frozen=True)
class PackedRows:
    """Documents side by side in rows of one length. All [rows, length]."""

    tokens: Tensor
    documents: Tensor
    """Number of the token's document within its row; -1 is padding."""
    positions: Tensor
    """Position within the document."""
    charged: Tensor
    """bool: whether the token is part of a response."""

    def select(self, rows: Tensor, device: torch.device) -> "PackedRows":
        """Some rows, on a device."""
        parts = (self.tokens, self.documents, self.positions, self.charged)
        return PackedRows(*(part[rows].to(device, non_blocking=True) for part in parts))

    def __len__(self) -> int:
        return self.tokens.shape[0]


def read_documents(paths: Sequence[str], encode: Encode, length: int) -> list[Document]:
    """Documents of JSONL files, cut at `length` tokens.

    A line holds `prompt_token_ids` and `token_ids` (what `peagle generate --json` prints), or
    `prompt` and `response`, or `text`. Raises `InputError` naming file and line.
    """
    documents = [
        Document(tokens[:length], prompt)
        for path in paths
        for tokens, prompt in _read(Path(path), encode)
        if len(tokens) > prompt + 1 and length > prompt + 1
    ]
    if not documents:
        raise InputError(f"{', '.join(paths)}: no document with a response that fits in a row")
    return documents


def _read(path: Path, encode: Encode) -> Iterator[tuple[tuple[int, ...], int]]:
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _tokens(line, f"{path}:{number}", encode)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None


def _tokens(line: str, place: str, encode: Encode) -> tuple[tuple[int, ...], int]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{place}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise InputError(f"{place}: not a JSON object")
    if "token_ids" in value and "prompt_token_ids" in value:
        prompt, response = (_ids(value, key, place) for key in ("prompt_token_ids", "token_ids"))
    elif "prompt" in value and "response" in value:
        prompt, response = (encode(_text(value, key, place)) for key in ("prompt", "response"))
    elif "text" in value:
        prompt, response = [], encode(_text(value, "text", place))
    else:
        raise InputError(f"{place}: needs prompt_token_ids + token_ids, prompt + response, or text")
    return (*prompt, *response), len(prompt)


def _ids(value: dict[str, Any], key: str, place: str) -> list[int]:
    ids = value[key]
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise InputError(f"{place}: {key} is not a list of token ids")
    return ids


def _text(value: dict[str, Any], key: str, place: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise InputError(f"{place}: {key} is not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{place}: {key} is not valid UTF-8 text: {error}") from None
    return text


def pack(documents: Sequence[Document], length: int) -> PackedRows:
    """Fill rows of `length` tokens with whole documents, in order."""
    rows: list[list[Document]] = [[]]
    room = length
    for document in documents:
        if len(document.tokens) > room:
            rows.append([])
            room = length
        rows[-1].append(document)
        room -= len(document.tokens)
    shape = (len(rows), length)
    packed = PackedRows(
        tokens=torch.zeros(shape, dtype=torch.int64),
        documents=torch.full(shape, PADDING, dtype=torch.int64),
        positions=torch.zeros(shape, dtype=torch.int64),
        charged=torch.zeros(shape, dtype=torch.bool),
    )
    for index, row in enumerate(rows):
        _fill(packed, index, row)
    return packed


def _fill(packed: PackedRows, row: int, documents: Sequence[Document]) -> None:
    start = 0
    for number, document in enumerate(documents):
        stop = start + len(document.tokens)
        packed.tokens[row, start:stop] = torch.tensor(document.tokens)
        packed.documents[row, start:stop] = number
        packed.positions[row, start:stop] = torch.arange(stop - start)
        packed.charged[row, start + document.prompt_length : stop] = True
        start = stop

"""Documents packed into rows of one length, and the rows of a pass end to end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from peagle.train.digest import digest


@dataclass(frozen=True)
class Document:
    """Text as token ids, and which of them a drafter is to learn."""

    tokens: tuple[int, ...]
    responses: tuple[tuple[int, int], ...]
    """First and past-the-last token of every response; other tokens are context only."""
    source: str = field(default="", compare=False)
    """Where it was read, for error messages."""

    @classmethod
    def answered(cls, tokens: Sequence[int], prompt_length: int) -> Self:
        """A prompt and its one response."""
        return cls(tuple(tokens), ((prompt_length, len(tokens)),))

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens before the first response."""
        return self.tokens[: self.responses[0][0]]


@dataclass(frozen=True)
class Batch:
    """Some packed rows end to end, on the CPU. All [length].

    A token's document begins `positions` tokens before it; padding is documents of one token.
    """

    tokens: Tensor
    positions: Tensor
    """Position within the document."""
    loss_mask: Tensor
    """bool: whether the token is part of a response."""

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def padded(self, multiple: int) -> "Batch":
        """The same, padded at its end to a multiple of `multiple` tokens."""
        missing = -len(self) % multiple
        parts = (self.tokens, self.positions, self.loss_mask)
        return Batch(*(torch.cat((part, part.new_zeros(missing))) for part in parts))

    @cached_property
    def starts(self) -> Tensor:
        """[length] index of the first token of each token's document."""
        return torch.arange(len(self)) - self.positions

    @property
    def one_document(self) -> bool:
        """Whether all tokens in the loss are in the first document."""
        return not self.starts[self.loss_mask].any()


@dataclass(frozen=True)
class PackedRows:
    """Documents in rows of one length, on the CPU. All [rows, length]."""

    tokens: Tensor
    positions: Tensor
    loss_mask: Tensor
    documents: tuple[tuple[Document, ...], ...]
    """The documents of each row."""

    @property
    def length(self) -> int:
        """Number of tokens in a row."""
        return self.tokens.shape[1]

    @cached_property
    def digest(self) -> str:
        """A digest that tells these rows from others."""
        parts = (self.tokens, self.positions, self.loss_mask)
        return digest(part.flatten().numpy().data for part in parts)

    def batch(self, rows: Tensor) -> Batch:
        """Some rows, end to end."""
        parts = (self.tokens, self.positions, self.loss_mask)
        return Batch(*(part[rows].flatten() for part in parts))

    def documents_of(self, rows: Tensor) -> list[Document]:
        """The documents of some rows."""
        return [document for row in rows.tolist() for document in self.documents[row]]

    def __len__(self) -> int:
        return self.tokens.shape[0]


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
        positions=torch.zeros(shape, dtype=torch.int64),
        loss_mask=torch.zeros(shape, dtype=torch.bool),
        documents=tuple(map(tuple, rows)),
    )
    for index, row in enumerate(rows):
        _fill(packed, index, row)
    return packed


def _fill(packed: PackedRows, row: int, documents: Sequence[Document]) -> None:
    start = 0
    for document in documents:
        stop = start + len(document.tokens)
        packed.tokens[row, start:stop] = torch.tensor(document.tokens)
        packed.positions[row, start:stop] = torch.arange(stop - start)
        for first, last in document.responses:
            packed.loss_mask[row, start + first : start + last] = True
        start = stop

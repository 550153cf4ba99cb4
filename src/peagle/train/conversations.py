"""Samples -> documents: the target's token ids, no document longer than a row."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from peagle.errors import InputError
from peagle.train.own_answers import check_ids, own_documents
from peagle.train.packing import Document
from peagle.train.samples import Chat, Continuation, Passage, Sample, TokenIds, read_samples
from peagle.train.template import ChatTemplate

Overlong = Literal["cut", "split", "drop"]
BATCH = 256
"""How many samples are encoded together."""


@dataclass(frozen=True)
class Summary:
    """Counts of what was read."""

    documents: int
    tokens: int
    response_tokens: int
    cut: int
    """Samples that lost their end."""
    split: int
    """Samples that are too long and became pieces, of which those with a response are left."""
    dropped: int
    """Samples left out: too long, or without two tokens of a response."""

    def __str__(self) -> str:
        return (
            f"{self.documents} documents, {self.tokens} tokens, {self.response_tokens} of them in "
            f"responses; {self.cut} samples cut, {self.split} split, {self.dropped} dropped"
        )


def read_documents(
    sources: Sequence[str],
    load_tokenizer: Callable[[], Any],
    length: int,
    overlong: Overlong,
    vocab_size: int,
) -> tuple[list[Document], Summary]:
    """Documents of at most `length` tokens, in the order of the data; each has a response.

    `load_tokenizer` is called when a sample first needs the target's tokenizer; `overlong` says
    what happens to a sample of more than `length` tokens. Raises `InputError` naming the line that
    cannot be used.
    """
    documents: list[Document] = []
    counts: Counter[str] = Counter()
    for of_sample in _encode(read_samples(sources), Encoder(load_tokenizer)):
        for document in of_sample:
            _check_vocabulary(document, vocab_size)
        pieces = [piece for document in of_sample for piece in fit(document, length, overlong)]
        documents += pieces
        if not pieces:
            counts["dropped"] += 1
        elif any(len(document.tokens) > length for document in of_sample):
            counts[overlong] += 1
    if not documents and not counts["dropped"]:
        raise InputError(f"{', '.join(sources)}: there are no samples")
    if not documents:
        raise InputError(
            f"{', '.join(sources)}: none of {counts['dropped']} samples has two tokens of a "
            f"response within row_length {length}; use longer responses, or raise row_length"
        )
    return documents, _summary(documents, counts)


def fit(document: Document, length: int, overlong: Overlong) -> list[Document]:
    """A document as pieces of at most `length` tokens, each with two tokens of one response, of
    which the second is not among the first two: a drafter predicts from two on."""
    size = len(document.tokens)
    starts: Iterable[int] = (0,)
    if size > length:
        starts = {"cut": (0,), "split": range(0, size, length), "drop": ()}[overlong]
    pieces = (_piece(document, start, start + length) for start in starts)
    return [piece for piece in pieces if any(b - a > 1 and b > 2 for a, b in piece.responses)]


class Encoder:
    """Samples -> documents by the target's tokenizer, which is loaded when first needed."""

    def __init__(self, load_tokenizer: Callable[[], Any]) -> None:
        self._load_tokenizer = load_tokenizer

    def encode(self, samples: Sequence[Any]) -> list[list[Document]]:
        """Documents of samples of one kind, in order. Raises `InputError` naming a sample."""
        kind = type(samples[0])
        if kind is Chat:
            return self._chats(samples)
        kinds: dict[type, Callable[[Sequence[Any]], list[Document]]] = {
            Continuation: self._completions,
            Passage: self._texts,
            TokenIds: self._token_ids,
        }
        return [[document] for document in kinds[kind](samples)]

    @cached_property
    def _tokenizer(self) -> Any:
        return self._load_tokenizer()

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer)

    def _chats(self, samples: Sequence[Chat]) -> list[list[Document]]:
        """Responses are the ids that the target wrote, else found in a rendering."""
        own = [sample for sample in samples if sample.token_ids]
        written = iter(own_documents(own, self._template, self._tokenizer))
        others = self._template.encode([sample for sample in samples if not sample.token_ids])
        rendered = iter([document] for document in others)
        return [next(written if sample.token_ids else rendered) for sample in samples]

    def _completions(self, samples: Sequence[Continuation]) -> list[Document]:
        """A response goes on where the prompt's tokens end, as when it is generated."""
        prompts = self._ids([sample.prompt for sample in samples])
        wholes = self._ids([sample.prompt + _response(sample) for sample in samples])
        return [
            Document.answered((*prompt, *self._written(sample, prompt, whole)), len(prompt))
            for sample, prompt, whole in zip(samples, prompts, wholes, strict=True)
        ]

    def _written(self, sample: Continuation, prompt: list[int], whole: list[int]) -> Sequence[int]:
        """The response's ids: as the target wrote them, if that is known, else as they follow the
        prompt's in the whole text, where these stay as they are."""
        if sample.token_ids is not None:
            check_ids(sample.token_ids, [_response(sample)], self._tokenizer, sample.place)
            return sample.token_ids
        if whole[: len(prompt)] == prompt:  # alone, a response may get a space of its own
            return whole[len(prompt) :]
        [alone] = self._ids([_response(sample)], add_special_tokens=False)
        return alone

    def _token_ids(self, samples: Sequence[TokenIds]) -> list[Document]:
        for sample in samples:
            if sample.text:
                [(start, stop)] = sample.responses
                said = sample.ids[start:stop]
                check_ids(said, [sample.text], self._tokenizer, sample.place)
        return [Document(sample.ids, sample.responses) for sample in samples]

    def _texts(self, samples: Sequence[Passage]) -> list[Document]:
        return [Document.answered(ids, 0) for ids in self._ids([s.text for s in samples])]

    def _ids(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return self._tokenizer(
            texts, add_special_tokens=add_special_tokens, verbose=False
        ).input_ids


def _encode(samples: Iterator[Sample], encoder: Encoder) -> Iterator[list[Document]]:
    """Each sample's documents."""
    for _, alike in itertools.groupby(samples, key=type):
        while batch := list(itertools.islice(alike, BATCH)):
            for sample, documents in zip(batch, encoder.encode(batch), strict=True):
                yield [replace(document, source=sample.place) for document in documents]


def _response(sample: Continuation) -> str:
    if sample.response is None:
        raise InputError(
            f"{sample.place}: the prompt has no response; peagle regenerate writes responses"
        )
    return sample.response


def _check_vocabulary(document: Document, vocab_size: int) -> None:
    largest = max(document.tokens, default=0)
    if largest >= vocab_size:
        raise InputError(
            f"{document.source}: token id {largest} is outside the target's vocabulary of "
            f"{vocab_size}; use data and a tokenizer of this target"
        )


def _piece(document: Document, start: int, stop: int) -> Document:
    """Tokens `start` to `stop` - 1, with the parts of responses that lie there."""
    tokens = document.tokens[start:stop]
    clipped = (
        (max(first - start, 0), min(last - start, len(tokens)))
        for first, last in document.responses
    )
    spans = tuple((first, last) for first, last in clipped if first < last)
    return Document(tokens, spans, document.source)


def _summary(documents: Sequence[Document], counts: Counter[str]) -> Summary:
    return Summary(
        documents=len(documents),
        tokens=sum(len(document.tokens) for document in documents),
        response_tokens=sum(b - a for document in documents for a, b in document.responses),
        cut=counts["cut"],
        split=counts["split"],
        dropped=counts["dropped"] + counts["drop"],
    )

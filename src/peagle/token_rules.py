"""Single tokens that are ruled out: all but some, and those that would complete a text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.engine.constraint import Constraint

NOTHING_LEFT = "no token is left by allowed_token_ids, bad_words and the form of the output"


class ConstraintDecorator:
    """What binds one request's output further than `rest`, the constraint of its form, if any."""

    def __init__(self, vocab_size: int, rest: Constraint | None) -> None:
        self._bytes, self._rest = -(-vocab_size // 8), rest

    @property
    def failure(self) -> str | None:
        """Why the output cannot go on."""
        return None if self._rest is None else self._rest.failure

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """As `Constraint.allowed`."""
        if self._rest is not None:
            return self._rest.allowed(drafts)
        return torch.full((len(drafts) + 1, self._bytes), 255, dtype=torch.uint8)

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were chosen."""
        if self._rest is not None:
            self._rest.advance(tokens)


class TokenRules(ConstraintDecorator):
    """One request's rules, perhaps together with the constraint of its form.

    allowed: the only tokens that may come; None: all. endings: sequences of which the last token
    may not come after the others.
    """

    def __init__(
        self,
        allowed: Iterable[int] | None,
        endings: Sequence[Sequence[int]],
        vocab_size: int,
        form: Constraint | None = None,
    ) -> None:
        super().__init__(vocab_size, form)
        single = [token for token, *more in endings if not more]
        self._always = ~_bits(single, self._bytes)
        """Tokens that may come wherever the form allows them, a bit each."""
        if allowed is not None:
            self._always &= _bits(allowed, self._bytes)
        self._last: dict[tuple[int, ...], list[int]] = {}
        """Tokens that may not come, by those before them."""
        for *before, token in endings:
            if before:
                self._last.setdefault(tuple(before), []).append(token)
        self._lengths = sorted({len(before) for before in self._last})
        self._recent: list[int] = []
        self._chosen = 0
        """How many of the next tokens are chosen among some that are left."""
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the output cannot go on."""
        return self._failure or super().failure

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """As `Constraint.allowed`. A row that leaves nothing allows anything, and then fails."""
        rows = super().allowed(drafts) & self._always
        for place, row in enumerate(rows):
            self._rule_out(row, [*self._recent, *drafts[:place]])
        empty = (rows == 0).all(dim=1)
        self._chosen = int(empty.int().argmax()) if bool(empty.any()) else len(rows)
        rows[empty] = 255
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were chosen."""
        if len(tokens) > self._chosen:
            self._failure = NOTHING_LEFT
            return
        super().advance(tokens)
        known = [*self._recent, *tokens]
        self._recent = known[len(known) - max(self._lengths, default=0) :]

    def _rule_out(self, row: Tensor, before: Sequence[int]) -> None:
        for length in self._lengths:
            for token in self._last.get(tuple(before[-length:]), ()):
                row[token >> 3] &= ~(1 << (token & 7)) & 255


@dataclass(frozen=True)
class ThoughtSpan:
    """The tokens between which a model thinks."""

    begin: int
    end: int
    within: bool
    """Whether it thinks from its first token on."""


class ThoughtBudget(ConstraintDecorator):
    """Ends thoughts after `most` of their tokens. rest: what else binds the output."""

    def __init__(
        self, span: ThoughtSpan, most: int, vocab_size: int, rest: Constraint | None
    ) -> None:
        super().__init__(vocab_size, rest)
        self._span, self._most, self._end = span, most, _bits([span.end], self._bytes)
        self._thought: int | None = 0 if span.within else None
        """Tokens of the present thoughts; None: it does not think."""

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """As `Constraint.allowed`: at the end of the budget only what ends the thoughts."""
        rows = super().allowed(drafts)
        thought = self._thought
        for row, draft in zip(rows, (*drafts, self._span.end), strict=True):
            if thought is not None and thought >= self._most:
                row.copy_(self._end)
            thought = self._after(thought, draft)
        return rows

    def advance(self, tokens: Sequence[int]) -> None:
        """Follow tokens that were chosen."""
        for token in tokens:
            self._thought = self._after(self._thought, token)
        super().advance(tokens)

    def _after(self, thought: int | None, token: int) -> int | None:
        if token == self._span.end:
            return None
        if thought is None:
            return 0 if token == self._span.begin else None
        return thought + 1


def endings_of(
    bad_words: Iterable[str], tokenizer: Any, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """The sequences of tokens that texts are written with."""
    spelt = (ids for word in bad_words for ids in _spellings(word, tokenizer))
    return tuple(ids for ids in spelt if max(ids) < vocab_size)  # others cannot be written


def _spellings(word: str, tokenizer: Any) -> list[tuple[int, ...]]:
    """A text's tokens, alone and after a space."""
    plain = word.lstrip(" ")
    found = (
        tuple(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)
        for text in (plain, f" {plain}")
    )
    return [ids for ids in dict.fromkeys(found) if ids and plain]


def _bits(tokens: Iterable[int], size: int) -> Tensor:
    """A bit for each of some tokens: [size] uint8."""
    bits = bytearray(size)
    for token in tokens:
        bits[token >> 3] |= 1 << (token & 7)
    return torch.frombuffer(bits, dtype=torch.uint8)

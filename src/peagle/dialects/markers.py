"""Markers: the texts between the parts of an answer, most of them tokens of their own."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Markers:
    """A dialect's markers in one tokenizer."""

    ids: Mapping[int, str] = field(default_factory=dict)
    """Those that are tokens: token id -> marker."""
    spelled: tuple[str, ...] = ()
    """Those that this tokenizer can only spell, which are looked for in the text."""

    @classmethod
    def of(cls, tokenizer: Any, names: Collection[str]) -> "Markers":
        """Find markers among a tokenizer's added tokens."""
        added: dict[str, int] = tokenizer.get_added_vocab()
        ids = {added[name]: name for name in names if name in added}
        return cls(ids, tuple(name for name in names if name not in added))

    def rule(self, name: str) -> str:
        """A marker in a Lark grammar: a token by its id, or its text."""
        for token, marker in self.ids.items():
            if marker == name:
                return f"<[{token}]>"
        return json.dumps(name)


class SpelledMarkers:
    """Finds markers that come as text, which may be cut anywhere."""

    def __init__(self, names: Collection[str]) -> None:
        self._names, self._held = tuple(names), ""

    def feed(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Text that holds no marker, each with the marker after it, if any.

        What may begin a marker is held back.
        """
        self._held += text
        while place := self._first():
            start, name = place
            yield self._held[:start], name
            self._held = self._held[start + len(name) :]
        cut = len(self._held) - self._begun()
        if cut:
            yield self._held[:cut], None
            self._held = self._held[cut:]

    def release(self) -> str:
        """What was held back, once nothing can follow it."""
        held, self._held = self._held, ""
        return held

    def _first(self) -> tuple[int, str] | None:
        places = ((self._held.find(name), name) for name in self._names)
        return min((place for place in places if place[0] >= 0), default=None)

    def _begun(self) -> int:
        """Most last characters that begin a marker."""
        starts = (name[:n] for name in self._names for n in range(1, len(name)))
        return max((len(start) for start in starts if self._held.endswith(start)), default=0)

"""An answer in parts, as newer APIs tell it: runs of thoughts, runs of content, and calls."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from peagle.server.delivery import Json


class AnswerPart(Protocol):
    """One part: how it looks, and the events in which a stream tells of it."""

    @property
    def shown(self) -> Json:
        """The part as it is now."""

    def begin(self) -> Iterator[Json]:
        """That it begins."""

    def add(self, text: str) -> Iterator[Json]:
        """More text, or more of a call's arguments."""

    def end(self, cut: bool) -> Iterator[Json]:
        """That it ends; `cut`: at a limit, rather than by itself."""


class Parts:
    """The fold of an answer's events, the same for a stream and for a whole answer.

    make: makes a part of its index and the event that opens it: `Reasoning`, `Content` or
    `CallBegin`.
    """

    def __init__(self, make: Callable[[int, Event], AnswerPart]) -> None:
        self.done: list[AnswerPart] = []
        """Those that have ended."""
        self._make = make
        self._open: AnswerPart | None = None
        self._kind: type[Event] | None = None
        """What opened it."""
        self._said: set[type[Event]] = set()
        """Kinds of text of which there was a part."""

    def take(self, events: Iterable[Event], cut: bool) -> None:
        """Take a whole answer, which no stream tells; `cut`: at a limit."""
        collections.deque(itertools.chain(self.read(events), self.close(cut)), maxlen=0)

    def read(self, events: Iterable[Event]) -> Iterator[Json]:
        """Take the answer's next events; what a stream tells of them."""
        for event in events:
            match event:
                case Reasoning(text) | Content(text):
                    yield from self._write(event, text)
                case CallBegin():
                    yield from self._begin(event)
                case CallArguments(text) if self._open is not None:
                    yield from self._open.add(text)
                case CallEnd():
                    yield from self.close(cut=False)

    def close(self, cut: bool) -> Iterator[Json]:
        """End the part that is open, if one is; `cut`: at a limit."""
        if self._open is not None:
            yield from self._open.end(cut)
            self.done.append(self._open)
            self._open = self._kind = None

    def _write(self, event: Event, text: str) -> Iterator[Json]:
        """Add text to the open part, or to a new one, without the line end that sets it apart."""
        if self._open is None or self._kind is not type(event):
            text = text.lstrip("\n") if type(event) in self._said else text
            if not text:
                return
            yield from self._begin(event)
        assert self._open is not None
        yield from self._open.add(text)

    def _begin(self, event: Event) -> Iterator[Json]:
        yield from self.close(cut=False)
        self._open, self._kind = self._make(len(self.done), event), type(event)
        self._said.add(type(event))
        yield from self._open.begin()

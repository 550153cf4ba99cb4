"""An answer in parts, as newer APIs tell it: runs of thoughts, runs of content, and calls."""

import collections
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from peagle.dialects import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from peagle.server.delivery import Json


class Part(Protocol):
    """One part: the events in which a stream tells that it begins, grows and ends."""

    def begin(self) -> Iterator[Json]:
        """That it begins."""
        ...

    def add(self, text: str) -> Iterator[Json]:
        """More text, or more of a call's arguments."""
        ...

    def end(self, cut: bool) -> Iterator[Json]:
        """That it ends; `cut`: at a limit, rather than by itself."""
        ...


P = TypeVar("P", bound=Part)
Made = TypeVar("Made", bound=Part, covariant=True)


class Maker(Protocol[Made]):
    """Makes the parts of one answer, each with its index."""

    def thoughts(self, index: int) -> Made:
        """A part for thoughts."""
        ...

    def content(self, index: int) -> Made:
        """A part for content."""
        ...

    def call(self, index: int, call: CallBegin) -> Made:
        """A part for a call."""
        ...


class Parts(Generic[P]):
    """The fold of an answer's events, the same for a stream and for a whole answer."""

    def __init__(self, make: Maker[P]) -> None:
        self.done: list[P] = []
        """Those that have ended."""
        self._make = make
        self._open: P | None = None
        self._kind: type[Event] | None = None
        """What opened it."""
        self._said: set[type[Event]] = set()
        """Kinds of text of which there was a part."""

    def take(self, events: Iterable[Event], cut: bool) -> None:
        """Take a whole answer, which no stream tells; `cut`: at a limit."""
        told = itertools.chain.from_iterable(map(self.read, events))
        collections.deque(itertools.chain(told, self.close(cut)), maxlen=0)

    def read(self, event: Event) -> Iterator[Json]:
        """Take the answer's next event; what a stream tells of it."""
        match event:
            case Reasoning(text):
                yield from self._write(Reasoning, text, self._make.thoughts)
            case Content(text):
                yield from self._write(Content, text, self._make.content)
            case CallBegin():
                yield from self._begin(CallBegin, lambda index: self._make.call(index, event))
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

    def _write(self, kind: type[Event], text: str, make: Callable[[int], P]) -> Iterator[Json]:
        """Add text to the open part, or to a new one, without the line end that sets it apart."""
        if self._open is None or self._kind is not kind:
            text = text.lstrip("\n") if kind in self._said else text
            if not text:
                return
            yield from self._begin(kind, make)
        assert self._open is not None
        yield from self._open.add(text)

    def _begin(self, kind: type[Event], make: Callable[[int], P]) -> Iterator[Json]:
        yield from self.close(cut=False)
        self._open, self._kind = make(len(self.done)), kind
        self._said.add(kind)
        yield from self._open.begin()

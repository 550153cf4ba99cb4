"""What readers of calls have in common: text is held until it is known what it is."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from peagle.dialects.events import Event
from peagle.dialects.tools import ToolUse


class HeldCalls(ABC):
    """Reads one section of calls, each of whose parts is read by a method of its own."""

    def __init__(self, use: ToolUse) -> None:
        self._use = use
        self._read: Callable[[], Iterator[Event]] = self._head
        """Reads the part that comes."""
        self.held = ""
        """What is no event yet."""
        self.refused = False
        """Whether what is held cannot become a call."""

    @property
    def within(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._read != self._head

    @property
    def over(self) -> bool:
        """Whether a call that has begun is complete unless more follows."""
        return False

    def feed(self, text: str) -> Iterator[Event]:
        """The events that more text makes, until `refused`."""
        self.held += text
        before = None
        while not self.refused and before != (self._read, len(self.held)):
            before = self._read, len(self.held)
            yield from self._read()

    @abstractmethod
    def keeps(self, marker: str) -> bool:
        """Whether a marker is text of an argument, even one that otherwise ends the section."""

    def marker(self, name: str) -> Iterator[Event]:
        """One of the format's markers, or one that is kept: text of a call."""
        return self.feed(name)

    def finish(self) -> Iterator[Event]:
        """The section is closed: complete what can be."""
        yield from ()

    def _may_begin(self, opening: str) -> bool:
        """Whether what is held may be the beginning of something that opens so."""
        begun = self.held.lstrip()
        return begun.startswith(opening) or opening.startswith(begun)

    @abstractmethod
    def _head(self) -> Iterator[Event]:
        """A call up to its arguments."""

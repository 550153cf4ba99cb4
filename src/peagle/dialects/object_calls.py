"""Calls whose arguments are an object, which is shown as it is written."""

from collections.abc import Iterator

from peagle.dialects.argument_schema import ANYTHING
from peagle.dialects.arguments import ArgumentsWriter
from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Event
from peagle.dialects.held_calls import HeldCalls
from peagle.dialects.tools import ToolUse


class ObjectCalls(HeldCalls):
    """Reads such calls; `_head` ends with `_begin`."""

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._arguments = ArgumentsWriter(ANYTHING)
        self._seen = 0
        """How much of what is held cannot begin a call."""

    def keeps(self, marker: str) -> bool:
        """Whether a marker is text of an argument."""
        return self.within and self._arguments.quoted

    def finish(self) -> Iterator[Event]:
        """Close what the model left open, but for a string: without its end it is cut."""
        if self._read == self._object:
            yield from self._said(self._arguments.finish())

    def _begin(self, name: str, end: int) -> Iterator[Event]:
        """A call, whose arguments begin at a place in what is held."""
        yield CallBegin(name)
        self.held = self.held[end:]
        self._arguments, self._seen = ArgumentsWriter(self._use.arguments_of(name)), 0
        self._read = self._object

    def _object(self) -> Iterator[Event]:
        text, self.held = self.held, ""
        yield from self._said(self._arguments.feed(text))

    def _said(self, arguments: str) -> Iterator[Event]:
        if arguments:
            yield CallArguments(arguments)
        if self._arguments.complete:
            yield CallEnd()
            self.held = self._arguments.held
            self._read = self._after

    def _after(self) -> Iterator[Event]:
        """What follows the arguments of a call."""
        self._read = self._head
        yield from ()

"""What finds the parts of an answer: fed with text and markers, it says events."""

from collections.abc import Iterable
from typing import Literal, Protocol

from peagle.dialects.events import Content, Event

Section = Literal["reasoning", "content", "call", "marker"]
"""What a token belongs to; `marker` is what only separates the others."""


class Parser(Protocol):
    """Follows one answer. Whatever a model writes, it says something and raises nothing."""

    section: Section
    """What text belongs to that comes next."""

    def text(self, text: str) -> Iterable[Event]:
        """Text between markers, in pieces of any length."""

    def marker(self, name: str) -> Iterable[Event]:
        """One of the dialect's marker tokens."""

    def finish(self, ended: bool) -> Iterable[Event]:
        """What was held back.

        ended: whether the model ended the answer, rather than a limit or a stop string.
        """


class PlainText:
    """Everything is content."""

    section: Section = "content"

    def text(self, text: str) -> Iterable[Event]:
        """All of it."""
        return (Content(text),) if text else ()

    def marker(self, name: str) -> Iterable[Event]:
        """Plain text has no markers."""
        raise AssertionError(name)

    def finish(self, ended: bool) -> Iterable[Event]:
        """Nothing is held back."""
        return ()

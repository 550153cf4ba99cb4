"""What an answer consists of, as it is read: thoughts, content and tool calls."""

import itertools
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


def call_id() -> str:
    """An identifier of one tool call."""
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call, whose arguments follow."""

    name: str
    id: str = field(default_factory=call_id)


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the newest call's arguments, which are JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The newest call is complete."""


CallEvent = CallBegin | CallArguments | CallEnd
Event = Reasoning | Content | CallEvent
TEXTS: tuple[Any, ...] = (Reasoning, Content, CallArguments)
"""Events of which several in a row say no more than one."""


@dataclass
class Call:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""
    """JSON, as the model wrote it."""
    complete: bool = False


@dataclass
class Message:
    """A whole answer: the fold of its events."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Take the next event."""
        match event:
            case Reasoning(text):
                self.reasoning += text
            case Content(text):
                self.content += text
            case CallBegin(name, id):
                self.calls.append(Call(id, name))
            case CallArguments(text):
                self.calls[-1].arguments += text
            case CallEnd():
                self.calls[-1].complete = True


def whole_call(name: str, arguments: str) -> tuple[Event, ...]:
    """The events of a call that is known at once."""
    return CallBegin(name), CallArguments(arguments), CallEnd()


def joined(events: Iterable[Event]) -> Iterator[Event]:
    """The same events with neighbours of a kind in one."""
    for kind, same in itertools.groupby(events, type):
        if kind in TEXTS:
            said: Any = same
            yield kind("".join(event.text for event in said))
        else:
            yield from same

"""Tool calls as JSON objects: `{"name": "f", "arguments": {…}}`, or with `parameters`."""

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Event

HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, if they are an object: then they can be shown as they come."""
FIRST_KEY = re.compile(r'\{\s*(?:"(?P<key>[^"]*)(?P<closed>")?)?')
KEYS = ("name", "arguments", "parameters", "type", "id", "function")
SIGNIFICANT = re.compile(r'["\\{}]')
SEPARATORS = "; \t\r\n"
"""What may stand between two calls."""


class ObjectEnd:
    """Finds the end of a JSON object that comes in pieces.

    depth: how many braces are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._quoted = depth, False
        self._escaped = -1
        """Place of the character that a backslash escapes, in the piece at hand."""

    def find(self, text: str) -> int | None:
        """How many characters of `text` belong to the object; None if it goes on after them."""
        for found in SIGNIFICANT.finditer(text):
            place, letter = found.start(), found[0]
            if place == self._escaped:
                continue
            if letter == "\\":
                self._escaped = place + 1
            elif letter == '"':
                self._quoted = not self._quoted
            elif not self._quoted:
                self._depth += 1 if letter == "{" else -1
                if self._depth == 0:
                    return place + 1
        self._escaped -= len(text)
        return None


class JSONCalls:
    """Reads one call or several.

    known: names of functions, where an object with another name is no call; None takes any name.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self._known = known
        self._read = self._head
        self._end = ObjectEnd()
        self._seen = 0
        """How much of what is held `_end` has seen."""
        self.held = ""
        """What is no event yet."""
        self.refused = False
        """Whether what is held cannot become a call."""

    @property
    def within(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._read != self._head

    def feed(self, text: str) -> Iterator[Event]:
        """The events that more text makes, until `refused`."""
        self.held += text
        before = None
        while not self.refused and before != (self._read, len(self.held)):
            before = self._read, len(self.held)
            yield from self._read()

    def marker(self, name: str) -> Iterator[Event]:
        """A marker within a call is text of it."""
        return self.feed(name)

    def finish(self) -> Iterator[Event]:
        """Calls end by themselves."""
        yield from ()

    def _head(self) -> Iterator[Event]:
        """A call up to its arguments, or all of one that is written in another order."""
        if not self._seen:
            self.held = self.held.lstrip(SEPARATORS)
        if not self.held:
            return
        if not self._may_be_call():
            self.refused = True
        elif "{" in self.held[self._seen :] and (head := HEAD.match(self.held)):
            yield from self._begin(head[1])
            if not self.refused:
                self.held = self.held[head.end() :]
                self._go_on(self._arguments, ObjectEnd())
        elif end := self._end.find(self.held[self._seen :]):
            yield from self._whole(self._seen + end)
        else:
            self._seen = len(self.held)

    def _may_be_call(self) -> bool:
        """Whether what is held may be the beginning of a call."""
        first = FIRST_KEY.match(self.held)
        if first is None:
            return False
        key = first["key"] or ""
        return key in KEYS if first["closed"] else any(known.startswith(key) for known in KEYS)

    def _begin(self, quoted: str) -> Iterator[Event]:
        """A call, by its name in quotes."""
        try:
            name = json.loads(quoted)
        except ValueError:
            name = None
        self.refused = name is None or (self._known is not None and name not in self._known)
        if not self.refused:
            yield CallBegin(name)

    def _arguments(self) -> Iterator[Event]:
        end = self._end.find(self.held)
        shown, self.held = self.held[:end], "" if end is None else self.held[end:]
        if shown:
            yield CallArguments(shown)
        if end is not None:
            yield CallEnd()
            self._go_on(self._tail, ObjectEnd(depth=1))

    def _tail(self) -> Iterator[Event]:
        """What follows the arguments, up to the end of the call's own object."""
        end = self._end.find(self.held)
        self.held = "" if end is None else self.held[end:]
        if end is not None:
            self._go_on(self._head, ObjectEnd())
        yield from ()

    def _whole(self, end: int) -> Iterator[Event]:
        """A complete object that does not begin as calls do."""
        call = _named(self.held[:end])
        if call is None:
            self.refused = True
            return
        name, arguments = call
        yield from self._begin(json.dumps(name))
        if not self.refused:
            yield CallArguments(arguments)
            yield CallEnd()
            self.held = self.held[end:]
            self._go_on(self._head, ObjectEnd())

    def _go_on(self, read: Any, end: ObjectEnd) -> None:
        self._read, self._end, self._seen = read, end, 0


def _named(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call, the latter as JSON; None if the text is no call."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else call
    name = call.get("name", inner)
    arguments = call.get("arguments", call.get("parameters")) or {}
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):  # JSON within JSON
        return name, arguments
    try:
        return name, json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return None

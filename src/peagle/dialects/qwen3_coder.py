"""Calls as Qwen3-Coder writes them: each argument as text between tags.

<tool_call>
<function=f>
<parameter=p>
VALUE
</parameter>
</function>
</tool_call>
"""

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Event
from peagle.dialects.markers import Markers
from peagle.dialects.tools import Argument, Tool, ToolUse, is_text

FUNCTION = re.compile(r"\s*<function=([^>]*)>")
PARAMETER = re.compile(r"\s*<parameter=([^>]*)>\n?")
FUNCTION_END = re.compile(r"\s*</function>")
VALUE_END = re.compile(r"\n?</parameter>(?=\s*(?:<parameter=|</function>))")
"""A value may itself hold the closing tag: it ends where another tag of a call follows."""
CLOSING = "</parameter>"
LEFT_OPEN = re.compile(r"\n?</parameter>\s*\Z|\n\Z")
"""What follows a value where the model leaves out what closes the call."""
POSSIBLE_END = re.compile(r"\n?</parameter>\s*(?:<[^>\n]*)?\Z|\n\Z|\n?<[/parmet]*\Z")
"""What may become a value's end with more text."""


class Qwen3CoderCalls:
    """`<function=…>` with a `<parameter=…>` for each argument."""

    name: ClassVar[str] = "qwen3_coder"
    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    also: ClassVar[str] = "<function="
    inner: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""
    separator: ClassVar[str] = "WS?"
    handover: ClassVar[str] = ""

    def reader(self, use: ToolUse, marked: bool) -> "TaggedCalls":
        """A reader of one section."""
        return TaggedCalls(use)

    def rules(self, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """Lark rules of a call; a text argument is free up to its closing tag."""
        names = [f"call_{index}" for index in range(len(use.tools))]
        call = f'"\\n<function=" ({" | ".join(names)}) "</function>\\n"'
        rules = [f"call: {opening} {call} {markers.rule(self.end)}"]
        for name, tool in zip(names, use.tools, strict=True):
            parts = [json.dumps(f"{tool.name}>\n")]
            for place, argument in enumerate(tool.arguments.values()):
                symbol = f"{name}_{place}"
                parts.append(symbol if argument.required else f"{symbol}?")
                rules += _argument(symbol, argument)
            rules.append(f"{name}: {' '.join(parts)}")
        return rules


def _argument(symbol: str, argument: Argument) -> list[str]:
    opening, closing = json.dumps(f"<parameter={argument.name}>\n"), '"\\n</parameter>\\n"'
    if is_text(argument.schema):
        return [
            f"{symbol}: {opening} {symbol}_text",
            f"{symbol}_text[suffix={closing}]: /(?s:.*)/",
        ]
    return [
        f"{symbol}: {opening} {symbol}_value {closing}",
        f"{symbol}_value: %json {json.dumps(argument.schema)}",
    ]


class TaggedCalls:
    """Reads calls; text arguments are shown as they come, others once they are complete."""

    def __init__(self, use: ToolUse) -> None:
        self._tools = {tool.name: tool for tool in use.tools}
        self._read = self._function
        self._tool = Tool("")
        self._argument: Argument | None = None
        self._named = 0
        """How many of the call's arguments have begun."""
        self._seen = 0
        """How much of a value that is held has no closing tag."""
        self.held = ""
        self.refused = False

    @property
    def within(self) -> bool:
        """Whether a call has begun and is not complete."""
        return self._read != self._function

    def feed(self, text: str) -> Iterator[Event]:
        """The events that more text makes, until `refused`."""
        self.held += text
        before = None
        while not self.refused and before != (self._read, self.held):
            before = self._read, self.held
            yield from self._read()

    def marker(self, name: str) -> Iterator[Event]:
        """A marker within a call is text of it."""
        return self.feed(name)

    def finish(self) -> Iterator[Event]:
        """End what the model left open."""
        if self._read == self._value:
            rest, self.held = LEFT_OPEN.sub("", self.held, count=1), ""
            yield from self._end_value(rest)
        if self.within:
            self.held = ""
            yield from self._end_call()

    def _function(self) -> Iterator[Event]:
        if found := FUNCTION.match(self.held):
            self._take(found)
            self._tool = self._tools.get(found[1], Tool(found[1]))
            self._named, self._read = 0, self._parameter
            yield CallBegin(found[1])
        else:
            self.refused = not _may_begin(self.held, "<function=")

    def _parameter(self) -> Iterator[Event]:
        """The next argument's tag, or the end of the call."""
        found = PARAMETER.match(self.held)
        if found and not found[0].endswith("\n") and found.end() == len(self.held):
            return  # a line end may follow
        if found:
            self._take(found)
            name = found[1]
            self._argument = self._tool.arguments.get(name) or Argument(name, {}, False)
            yield CallArguments(f"{', ' if self._named else '{'}{json.dumps(name)}: ")
            if is_text(self._argument.schema):
                yield CallArguments('"')
            self._named += 1
            self._read, self._seen = self._value, 0
        elif end := FUNCTION_END.match(self.held):
            self._take(end)
            yield from self._end_call()

    def _value(self) -> Iterator[Event]:
        assert self._argument is not None
        closing = self.held.find(CLOSING, max(self._seen - len(CLOSING), 0))
        if closing >= 0 and (end := VALUE_END.search(self.held, max(closing - 1, 0))):
            value, self.held = self.held[: end.start()], self.held[end.end() :]
            yield from self._end_value(value)
        elif is_text(self._argument.schema):
            held = POSSIBLE_END.search(self.held)
            sure = self.held[: held.start()] if held else self.held
            self.held = self.held[len(sure) :]
            if sure:
                yield CallArguments(_within_quotes(sure))
        elif closing < 0:
            self._seen = len(self.held)

    def _end_value(self, rest: str) -> Iterator[Event]:
        assert self._argument is not None
        if is_text(self._argument.schema):
            yield CallArguments(_within_quotes(rest) + '"')
        else:
            yield CallArguments(_as_json(rest.strip(), self._argument.schema))
        self._read = self._parameter

    def _end_call(self) -> Iterator[Event]:
        yield CallArguments("}" if self._named else "{}")
        yield CallEnd()
        self._read = self._function

    def _take(self, found: re.Match[str]) -> None:
        self.held = self.held[found.end() :]


def _may_begin(text: str, tag: str) -> bool:
    text = text.lstrip()
    return text.startswith(tag) or tag.startswith(text)


def _within_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str, schema: Any) -> str:
    """A value that is no text, as JSON; what cannot be read as such is a string."""
    words = {"True": "true", "False": "false", "None": "null"}
    text = words.get(text, text)
    try:
        json.loads(text, parse_constant=int)  # NaN and infinity are not JSON
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text

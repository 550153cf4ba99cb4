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
from functools import partial

from peagle.dialects.argument_schema import ANY, ANYTHING, Argument
from peagle.dialects.arguments import OTHER_THAN_TEXT, as_arguments, is_text, typed, within_quotes
from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Content, Event
from peagle.dialects.held_calls import HeldCalls
from peagle.dialects.markers import Markers
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse
from peagle.dialects.value_rules import ANY_TEXT, object_rules, text_terminal

FUNCTION = re.compile(r"\s*<function=([^>]*)>")
PARAMETER = re.compile(r"\s*<parameter=([^>]*)>\n?")
FUNCTION_END = re.compile(r"\s*</function>")
TAG = re.compile(
    r"\n?</parameter>\s*(?:(?P<next><parameter=(?P<name>[^>\n]*)>)|(?P<last></function>))"
    r"|(?P<begin><function=|<tool_call>)|</function>|</tool_call>"
)
"""What may end an argument, or shows that its text tells of calls."""
CLOSING = re.compile(r"\n?(?:</parameter>\s*)?(?:</function>\s*)?(?:</tool_call>\s*)?\Z")
"""What closes a call, as far as the model writes it."""
BEGUN_TAG = re.compile(r"\n?</parameter>\s*(?:<[^>\n]*)?\Z|\n?(?:</?[a-z_]{0,9})?\Z")
"""What may become a tag, or the line end before it, with more text."""


class Qwen3CoderCalls(CallFormat):
    """`<function=…>` with a `<parameter=…>` for each argument."""

    name, begin, end = "qwen3_coder", "<tool_call>", "</tool_call>"
    also = "<function="

    def reader(self, use: ToolUse, marked: bool) -> "TaggedCalls":
        """A reader of one section."""
        return TaggedCalls(use)

    def _section(self, either: str, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        call = f'"\\n<function=" ({either}) "</function>\\n"'
        return [f"call: {opening} {call} {markers.rule(self.end)}"]

    def _call(self, name: str, tool: Tool, markers: Markers) -> list[str]:
        """A text argument goes up to its closing tag."""
        head, rules_of = json.dumps(f"{tool.name}>\n"), partial(_rules, tool)
        arguments = f"{name}_arguments"
        rules = object_rules(arguments, tool.arguments.objects, tool, "", rules_of)
        return [f"{name}: {head} {arguments}", *rules]


def _rules(tool: Tool, symbol: str, argument: Argument) -> list[str]:
    """Rules of an argument: text, or else JSON."""
    schema = argument.schema
    opening, closing = json.dumps(f"<parameter={argument.name}>\n"), '"\\n</parameter>\\n"'
    texts = [text_terminal(one, tool) for one in schema.options if "string" in one.types]
    texts = [ANY_TEXT] if ANY_TEXT in texts else texts
    anything = any(one.types == ANY for one in schema.options)
    others = frozenset[str]() if anything else schema.types - {"string"}
    otherwise = (OTHER_THAN_TEXT[one] for one in sorted(others & {*OTHER_THAN_TEXT}))
    but_others = "".join(f" & ~/(?:{first_line})(?s:\\n.*)?/" for first_line in otherwise)
    either, rules = [], []
    for n, text in enumerate(texts):
        either.append(f"{symbol}_text_{n}")
        rules.append(f"{symbol}_text_{n}[suffix={closing}]: TEXT_{symbol.upper()}_{n}")
        rules.append(f"TEXT_{symbol.upper()}_{n}: {text}{but_others}")
    if others:
        either.append(f"{symbol}_json {closing}")
        rules.append(f"{symbol}_json: %json {json.dumps(schema.of_types(others).closed)}")
    return [f"{symbol}: {opening} ({' | '.join(either)})", *rules]


class TaggedCalls(HeldCalls):
    """Reads calls; text arguments are shown as they come, others once they are complete.

    The text of an argument may tell of calls: what closes one that began in it does not end it, and
    neither does what is followed by more text.
    """

    def __init__(self, use: ToolUse) -> None:
        super().__init__(use)
        self._arguments = self._schema = ANYTHING
        """The schemas of the call, and of the argument that is read."""
        self._names: set[str] = set()
        """The call's arguments so far."""
        self._text: bool | None = None
        """Whether the argument is a string, as far as that is known."""
        self._depth = {"function": 0, "tool_call": 0}
        """Calls of which the argument's text tells and that are open."""
        self._seen, self._end = 0, 0
        """How much of it holds no further tag, and the end of what may close the call, if any."""
        self._tells = False
        """Whether there was a closing tag, of this call or of one that the text tells of."""
        self._closed: tuple[int, int] | None = None
        """Where the argument and the call end, if all is closed as it should be."""

    @property
    def over(self) -> bool:
        """Whether the call is complete if nothing follows."""
        closed = self._read == self._value and self._closed
        return bool(closed and not self.held[closed[1] :].strip())

    def keeps(self, marker: str) -> bool:
        """Whether a marker may be text of an argument."""
        return self._read == self._value and not (marker == Qwen3CoderCalls.begin and self.over)

    def finish(self) -> Iterator[Event]:
        """End what the model left open; what has no end of any kind is cut."""
        if not self.within:
            return
        end = self._last(len(self.held))
        if end is None and self._read == self._parameter and not self.held.strip():
            end = 0, 0
        if end is not None:
            rest = self.held[end[1] :].strip()
            yield from self._end_call(self.held[: end[0]])
            self.held = ""
            yield from [Content(rest)] if rest else []

    def _head(self) -> Iterator[Event]:
        if found := FUNCTION.match(self.held):
            self._take(found.end())
            self._arguments, self._names = self._use.arguments_of(found[1]), set()
            self._read = self._parameter
            yield CallBegin(found[1])
        else:
            self.refused = not self._may_begin("<function=")

    def _parameter(self) -> Iterator[Event]:
        """The next argument's tag, or the end of the call."""
        found = PARAMETER.match(self.held)
        if found and not found[0].endswith("\n") and found.end() == len(self.held):
            return  # a line end may follow
        if found:
            self._take(found.end())
            yield CallArguments(f"{', ' if self._names else '{'}{json.dumps(found[1])}: ")
            self._schema, self._text = self._arguments.value(found[1]), None
            self._names.add(found[1])
            self._read = self._value
            self._depth, self._seen, self._end = {"function": 0, "tool_call": 0}, 0, 0
            self._closed, self._tells = None, False
        elif end := FUNCTION_END.match(self.held):
            yield from self._end_call("")
            self._take(end.end())

    def _value(self) -> Iterator[Event]:
        """An argument, as far as it is certain that it goes on."""
        while tag := TAG.search(self.held, self._seen):
            if tag["next"] and self._is_next(tag["name"]):
                yield from self._end_value(self.held[: tag.start()])
                self._take(tag.start("next"))
                return
            if tag["begin"] == "<function=" and self._is_another(tag.start()):
                yield from self._end_call(self.held[: self._closing(self._end).start()])
                self._take(tag.start())
                return
            if not (self._tells or tag["next"] or tag["begin"]):
                self._tells = True
                yield from self._show(self._closing(tag.end()).start())
                continue
            self._seen = tag.end()
            self._count(tag)
        begun = BEGUN_TAG.search(self.held, self._seen)
        assert begun is not None  # perhaps of nothing
        self._seen = begun.start()
        if not self._tells:
            yield from self._show(self._seen)

    def _show(self, end: int) -> Iterator[Event]:
        """The beginning of an argument, if it is a string."""
        sure = self.held[:end]
        self._seen = end
        if self._text is None:
            self._text = is_text(sure, self._schema)
            yield from [CallArguments('"')] if self._text else []
        if self._text and sure:
            self._take(end)
            self._seen = 0
            yield CallArguments(within_quotes(sure))

    def _is_next(self, name: str) -> bool:
        """Whether it is an argument of this call, rather than of one that a text tells of."""
        known = not self._depth["function"] or name in self._arguments.names
        return known and name not in self._names

    def _is_another(self, place: int) -> bool:
        """Whether a function that begins at a place is the next call."""
        whole = self._closed is not None and self._closed[1] == self._end
        between = self.held[self._end : place].strip()
        return self._end > 0 and (between == "<tool_call>" or (whole and not between))

    def _count(self, tag: re.Match[str]) -> None:
        """Follow calls of which a text tells, and remember what may be the end of this one."""
        kind = "tool_call" if "tool_call" in tag[0] else "function"
        if tag["begin"]:
            self._depth[kind] += 1
        elif tag["next"]:
            return
        elif self._closed and not self.held[self._closed[1] : tag.start()].strip():
            self._closed, self._end = (self._closed[0], tag.end()), tag.end()
        elif self._depth[kind]:
            self._depth[kind] -= 1
        else:
            self._closed = (tag.start(), tag.end()) if tag["last"] else self._closed
            self._end = tag.end()

    def _closing(self, end: int) -> re.Match[str]:
        """What closes a call up to a place."""
        found = CLOSING.search(self.held, 0, end)
        assert found is not None  # perhaps nothing
        return found

    def _last(self, end: int) -> tuple[int, int] | None:
        """Where the last argument ends, and its call, if nothing after a place belongs to it."""
        found = self._closing(end)
        closing = found[0].strip()
        if self._closed and not closing.startswith("</parameter>"):
            return self._closed
        return (found.start(), end) if closing else None

    def _end_value(self, rest: str) -> Iterator[Event]:
        if self._text is None and is_text(rest, self._schema):
            yield CallArguments('"')
            self._text = True
        yield CallArguments(within_quotes(rest) + '"' if self._text else typed(rest, self._schema))
        self._read = self._parameter

    def _end_call(self, rest: str) -> Iterator[Event]:
        """Close a call after the rest of its last argument; one without any may be JSON."""
        if self._read == self._value:
            yield from self._end_value(rest)
        if self._names:
            yield CallArguments("}")
        else:
            yield CallArguments(as_arguments(rest, self._arguments) or "{}")
        yield CallEnd()
        self._read = self._head

    def _take(self, end: int) -> None:
        self.held = self.held[end:]

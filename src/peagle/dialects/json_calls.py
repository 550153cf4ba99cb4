"""Tool calls as JSON objects: `{"name": "f", "arguments": {…}}`, or with `parameters`.

Hermes and Qwen3 write them between `<tool_call>` and `</tool_call>`; Llama 3.x as an answer that is
JSON, or as JSON after `<|python_tag|>`.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from peagle.dialects.argument_schema import ANYTHING
from peagle.dialects.arguments import SPACE, ArgumentsWriter, as_arguments
from peagle.dialects.events import Event, whole_call
from peagle.dialects.markers import Markers
from peagle.dialects.object_calls import ObjectCalls
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse

HEAD = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
"""A call up to its arguments, if they are an object: then they can be shown as they come."""
FIRST_KEY = re.compile(r"""\{\s*(?:["'](?P<key>[^"']*)(?P<closed>["'])?)?""")
KEYS = ("name", "arguments", "parameters", "type", "id", "function")
SEPARATORS = f";{SPACE}"
"""What may stand between two calls."""


class JSONCalls(ObjectCalls):
    """Reads one call or several.

    known: names of functions, where an object with another name is no call; None takes any name.
    """

    def __init__(self, use: ToolUse, known: Collection[str] | None = None) -> None:
        super().__init__(use)
        self._known = known
        self._call, self._written = ArgumentsWriter(ANYTHING), ""
        """What writes a whole call as JSON, or what follows its arguments, and what it wrote."""

    def finish(self) -> Iterator[Event]:
        """Close what the model left open."""
        yield from super().finish()
        if self._read == self._head and self._seen and not self.refused:
            self._written += self._call.finish()
            yield from self._whole()

    def _head(self) -> Iterator[Event]:
        """A call up to its arguments, or all of one that is written in another order."""
        if not self._seen:
            self.held = self.held.lstrip(SEPARATORS)
        new, self._seen = self.held[self._seen :], len(self.held)
        if not self.held:
            return
        if not self._may_be_call():
            self.refused = True
        elif "{" in new and (head := HEAD.match(self.held)):
            name = _name(head[1])
            self.refused = name is None or not self._knows(name)
            if name is not None and not self.refused:
                self._call, self._written = ArgumentsWriter(ANYTHING), ""
                self._call.feed('{"":0')  # after the arguments, within the call's own braces
                yield from self._begin(name, head.end())
        else:
            self._written += self._call.feed(new)
            yield from self._whole()

    def _may_be_call(self) -> bool:
        """Whether what is held may be the beginning of a call."""
        first = FIRST_KEY.match(self.held)
        if first is None:
            return False
        key = first["key"] or ""
        return key in KEYS if first["closed"] else any(known.startswith(key) for known in KEYS)

    def _knows(self, name: str) -> bool:
        return self._known is None or name in self._known

    def _whole(self) -> Iterator[Event]:
        """A call that does not begin as calls do, once it is complete."""
        if not self._call.complete:
            return
        name, arguments = None, None
        with contextlib.suppress(RecursionError):
            name, arguments = call_parts(json.loads(self._written), self._use)
        self.refused = name is None or arguments is None or not self._knows(name)
        if name is not None and arguments is not None and not self.refused:
            yield from whole_call(name, arguments)
            self._expect_call()

    def _after(self) -> Iterator[Event]:
        """What follows the arguments, up to the end of the call's own object."""
        self._call.feed(self.held)
        self.held = ""
        if self._call.complete:
            self._expect_call()
        yield from ()

    def _expect_call(self) -> None:
        self.held, self._seen, self._read = self._call.held, 0, self._head
        self._call, self._written = ArgumentsWriter(ANYTHING), ""


def call_parts(call: Any, use: ToolUse) -> tuple[str | None, str | None]:
    """Name and arguments (JSON) of a call in one of its forms; None for what it has not."""
    call = call if isinstance(call, dict) else {}
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else call
    name = call.get("name", inner)
    given = call.get("arguments", call.get("parameters"))
    if not isinstance(name, str) or not isinstance(given, str | dict | None):
        return None, None
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return name, as_arguments(text, use.arguments_of(name))


def _name(quoted: str) -> str | None:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return None


class HermesCalls(CallFormat):
    """`<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`, one section for each call."""

    name, begin, end = "hermes", "<tool_call>", "</tool_call>"

    def reader(self, use: ToolUse, marked: bool) -> JSONCalls:
        """A reader of one section."""
        return JSONCalls(use)

    def _section(self, either: str, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        return [f"call: {opening} ({either}) {markers.rule(self.end)}"]

    def _call(self, name: str, tool: Tool, markers: Markers) -> list[str]:
        head = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
        return [
            f'{name}: {head} {name}_arguments "}}\\n"',
            f"{name}_arguments: %json {json.dumps(tool.schema)}",
        ]


class LlamaCalls(CallFormat):
    """`{"name": "f", "parameters": {…}}`, several separated by `; `."""

    name, begin = "llama3_json", "<|python_tag|>"
    bare, separator = "{", '"; "'

    def reader(self, use: ToolUse, marked: bool) -> JSONCalls:
        """A reader of one section. Without a marker, an object that names no tool is content."""
        return JSONCalls(use, None if marked else use.names)

    def _section(self, either: str, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        return [f"call: {either}"]

    def _call(self, name: str, tool: Tool, markers: Markers) -> list[str]:
        return [f"{name}: %json {json.dumps(_as_schema(tool))}"]


def _as_schema(tool: Tool) -> dict[str, Any]:
    """The schema of a whole call: told as text, it could not be told apart from a form in JSON."""
    arguments = tool.arguments.closed
    definitions = {key: arguments.pop(key) for key in ("$defs",) if key in arguments}
    properties = {"name": {"const": tool.name}, "parameters": arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
        **definitions,
    }

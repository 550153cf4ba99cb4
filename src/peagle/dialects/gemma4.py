"""Calls as Gemma 4 writes them: bare keys, and strings between tokens of their own.

<|tool_call>call:f{city:<|"|>Paris<|"|>,days:2,tags:[<|"|>a<|"|>]}<tool_call|>
"""

import json
import re
from collections.abc import Iterator

from peagle.dialects.arguments import QUOTE_TOKEN
from peagle.dialects.events import Event
from peagle.dialects.markers import Markers
from peagle.dialects.object_calls import ObjectCalls
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse
from peagle.dialects.value_rules import ANY_TEXT, BARE, ValueRules

QUOTE = '<|"|>'
CALL = "call:"
NAME = re.compile(r"\s*call:([^{]*)(?=\{)")


class Gemma4Calls(CallFormat):
    """`call:f{…}` between `<|tool_call>` and `<tool_call|>`."""

    name, begin, end = "gemma4", "<|tool_call>", "<tool_call|>"
    inner, handover = (QUOTE,), "<|tool_response>"

    def reader(self, use: ToolUse, marked: bool) -> "Gemma4Reader":
        """A reader of one call."""
        return Gemma4Reader(use)

    def _section(self, either: str, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        quote = markers.rule(QUOTE)
        return [
            f'call: {opening} "call:" ({either}) {markers.rule(self.end)}',
            f"string: {quote} TEXT {quote}",
            f"TEXT: {ANY_TEXT}",
            'array: "[" (value ("," value)*)? "]"',
            'object: "{" (key ":" value ("," key ":" value)*)? "}"',
            f"key: /{BARE.pattern}/ | string",
            'number: %json {"type": "number"}',
            'value: string | number | "true" | "false" | "null" | array | object',
        ]

    def _call(self, name: str, tool: Tool, markers: Markers) -> list[str]:
        values = ValueRules(f"{name}_value", tool, markers.rule(QUOTE))
        either = " | ".join(map(values.object, tool.arguments.objects)) or '"{}"'
        return [f"{name}: {json.dumps(tool.name)} ({either})", *values.rules()]


class Gemma4Reader(ObjectCalls):
    """Reads calls, and writes their arguments as JSON as they come."""

    def keeps(self, marker: str) -> bool:
        """Whether a marker is text of an argument, or quotes one."""
        return self.within and (marker == QUOTE or super().keeps(marker))

    def marker(self, name: str) -> Iterator[Event]:
        """A quote, which begins or ends a string; all else is text."""
        return self.feed(QUOTE_TOKEN if self.within and name == QUOTE else name)

    def _head(self) -> Iterator[Event]:
        new, self._seen = self.held[self._seen :], len(self.held)
        if "{" in new and (name := NAME.match(self.held)):
            yield from self._begin(name[1].strip(), name.end())
            return
        self.refused = not self._may_begin(CALL)

"""Calls as Hermes and Qwen3 write them: JSON between `<tool_call>` and `</tool_call>`."""

import json
from typing import ClassVar

from peagle.dialects.json_calls import JSONCalls
from peagle.dialects.markers import Markers
from peagle.dialects.tools import ToolUse


class HermesCalls:
    """`<tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>`, one section for each call."""

    name: ClassVar[str] = "hermes"
    begin: ClassVar[str] = "<tool_call>"
    end: ClassVar[str] = "</tool_call>"
    also: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = ""
    separator: ClassVar[str] = "WS?"
    handover: ClassVar[str] = ""

    def reader(self, use: ToolUse, marked: bool) -> JSONCalls:
        """A reader of one section."""
        return JSONCalls(use)

    def rules(self, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """Lark rules of a call."""
        names = [f"call_{index}" for index in range(len(use.tools))]
        rules = [f"call: {opening} ({' | '.join(names)}) {markers.rule(self.end)}"]
        for name, tool in zip(names, use.tools, strict=True):
            head = json.dumps(f'\n{{"name": {json.dumps(tool.name)}, "arguments": ')
            rules.append(f'{name}: {head} {name}_arguments "}}\\n"')
            rules.append(f"{name}_arguments: %json {json.dumps(tool.schema)}")
        return rules

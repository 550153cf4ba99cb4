"""Calls as Hermes and Qwen3 write them: JSON between `<tool_call>` and `</tool_call>`."""

import json

from peagle.dialects.json_calls import JSONCalls
from peagle.dialects.markers import Markers
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse


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

"""Calls as Llama 3.x writes them: an answer that is JSON, or JSON after `<|python_tag|>`."""

import json
from typing import Any

from peagle.dialects.json_calls import JSONCalls
from peagle.dialects.markers import Markers
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse


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

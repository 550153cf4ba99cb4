"""Calls as Llama 3.x writes them: an answer that is JSON, or JSON after `<|python_tag|>`."""

import json
from typing import Any, ClassVar

from peagle.dialects.json_calls import JSONCalls
from peagle.dialects.markers import Markers
from peagle.dialects.tools import Tool, ToolUse


class LlamaCalls:
    """`{"name": "f", "parameters": {…}}`, several separated by `; `."""

    name: ClassVar[str] = "llama3_json"
    begin: ClassVar[str] = "<|python_tag|>"
    end: ClassVar[str] = ""
    also: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = "{"
    separator: ClassVar[str] = '"; "'
    handover: ClassVar[str] = ""

    def reader(self, use: ToolUse, marked: bool) -> JSONCalls:
        """A reader of one section. Without a marker, an object that names no tool is content."""
        return JSONCalls(use, None if marked else use.names)

    def rules(self, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """Lark rules of a call."""
        names = [f"call_{index}" for index in range(len(use.tools))]
        rules = [f"call: {' | '.join(names)}"]
        for name, tool in zip(names, use.tools, strict=True):
            rules.append(f"{name}: %json {json.dumps(_as_schema(tool))}")
        return rules


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

"""Tools as functions: the names that the model sees, and those that the client knows."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peagle.dialects.arguments import CHARACTERS
from peagle.server.delivery import Json
from peagle.server.responses.body import AnyTool, CustomTool, FunctionTool, NamespaceTool

INPUT = "input"
"""The one argument of a function that stands for a custom tool."""
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
BEFORE_INPUT = re.compile(rf'\s*{{\s*"{INPUT}"\s*:\s*"')


@dataclass(frozen=True)
class ToolName:
    """A tool as its client knows it."""

    name: str
    namespace: str | None = None
    custom: bool = False
    """Whether its input is text, rather than JSON."""

    @property
    def flat(self) -> str:
        """The name of its function, since models know no namespaces."""
        before = "" if self.namespace is None else f"{self.namespace.rstrip('_')}__"
        return before + self.name


class Tools:
    """A request's tools, without those that run on OpenAI's servers."""

    def __init__(self, tools: Sequence[AnyTool]) -> None:
        described = list(_described(tools, None))
        self.functions = [
            {"type": "function", "function": {"name": name.flat, **fields}}
            for name, fields in described
        ]
        """As chat completions take them."""
        self._names = {name.flat: name for name, _ in described}

    def named(self, function: str) -> ToolName:
        """The tool for which a function stands; an unlisted one is the client's to refuse."""
        return self._names.get(function, ToolName(function))


class CustomInput:
    """A custom tool's input, out of the JSON in which a model writes it."""

    def __init__(self) -> None:
        self._held, self._begun, self._ended = "", False, False

    def feed(self, arguments: str) -> str:
        """The input's next characters that are whole."""
        self._held += arguments
        if not self._begun and (head := BEFORE_INPUT.match(self._held)):
            self._begun, self._held = True, self._held[head.end() :]
        if not self._begun or self._ended:
            return ""
        whole = CHARACTERS['"'].match(self._held)
        assert whole is not None  # perhaps of nothing
        text, self._held = whole[0], self._held[whole.end() :]
        self._ended = self._held.startswith('"')
        halves = str(json.loads(f'"{text}"', strict=False)).encode("utf-16", "surrogatepass")
        return halves.decode("utf-16", "replace")

    def finish(self) -> str:
        """What is left: JSON of another form is the input as it stands."""
        return "" if self._begun else self._held


def _described(tools: Sequence[AnyTool], namespace: str | None) -> Iterator[tuple[ToolName, Json]]:
    """The tools by their names, each with its function's other fields."""
    for tool in tools:
        match tool:
            case NamespaceTool():
                yield from _described(tool.tools, tool.name)
            case FunctionTool():
                fields = tool.model_dump(exclude_none=True, exclude={"type", "name"})
                yield ToolName(tool.name, namespace), fields
            case CustomTool():
                name = ToolName(tool.name, namespace, custom=True)
                yield name, {"description": _with_grammar(tool), "parameters": INPUT_SCHEMA}


def _with_grammar(tool: CustomTool) -> str | None:
    """A custom tool's description, and the grammar that its input is to follow."""
    match tool.format:
        case {"syntax": str(syntax), "definition": str(definition)}:
            told = f"The input follows this grammar ({syntax}):\n{definition}"
            return f"{tool.description}\n\n{told}" if tool.description else told
    return tool.description

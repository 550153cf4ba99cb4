"""Tools: the functions that a model may call, and how a request wants it to."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.dialects.argument_schema import ANYTHING, ArgumentSchema
from peagle.schema import kept_schema, leave_out

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments; None is any object."""
    strict: bool = False
    """Whether the arguments must fit the schema, even where the model may choose not to call."""

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> "Tool":
        """A tool in OpenAI's form."""
        function = tool["function"]
        parameters, strict = function.get("parameters"), function.get("strict")
        return cls(function["name"], parameters, strict is True)

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON schema of its arguments."""
        return self.parameters or ANY_OBJECT

    def leave_out(self, keyword: str) -> None:
        """Leave out a keyword of the schema that a dialect's grammar does not keep.

        Raises `InputError` for a strict tool.
        """
        leave_out((keyword,), self.strict, f"tool {self.name}")

    @functools.cached_property
    def arguments(self) -> ArgumentSchema:
        """The same, with its references resolved."""
        return ArgumentSchema(self.schema)


@dataclass(frozen=True)
class ToolUse:
    """The functions that a request lets the model call, and how."""

    tools: tuple[Tool, ...]
    required: bool = False
    """Whether the answer must consist of calls."""
    most: int | None = None
    """Most calls; None is no limit."""

    @property
    def kept(self) -> "ToolUse":
        """The same with schemas that grammars can keep, so that more arguments may fit.

        Raises `InputError` for a strict tool that asks for more than they can.
        """
        tools = [
            replace(tool, parameters=kept_schema(tool.schema, tool.strict, f"tool {tool.name}"))
            for tool in self.tools
        ]
        return replace(self, tools=tuple(tools))

    @property
    def names(self) -> frozenset[str]:
        """The functions' names."""
        return frozenset(tool.name for tool in self.tools)

    def arguments_of(self, name: str) -> ArgumentSchema:
        """The schema of a function's arguments; of one that does not exist, anything."""
        found = (tool.arguments for tool in self.tools if tool.name == name)
        return next(found, ANYTHING)

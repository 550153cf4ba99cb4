"""Tools: the functions that a model may call, and how a request wants it to."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from peagle.schema import kept_schema

ANYTHING: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Argument:
    """An argument of a function."""

    name: str
    schema: Any
    """Its JSON schema."""
    required: bool


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
        return self.parameters or ANYTHING

    @property
    def arguments(self) -> dict[str, Argument]:
        """The arguments that the schema names, in its order, those first that are required."""
        properties, required = self.schema.get("properties"), self.schema.get("required")
        names = required if isinstance(required, list) else ()
        needed = frozenset(name for name in names if isinstance(name, str))
        named = properties if isinstance(properties, dict) else {}
        arguments = [Argument(name, schema, name in needed) for name, schema in named.items()]
        arguments.sort(key=lambda argument: not argument.required)
        return {argument.name: argument for argument in arguments}


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


def types_of(schema: Any) -> Iterator[str]:
    """The JSON types that a schema names, its alternatives' included."""
    if not isinstance(schema, dict):
        return
    named = schema.get("type")
    names = named if isinstance(named, list) else [named]
    yield from (name for name in names if isinstance(name, str))
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        for one in options if isinstance(options, list) else ():
            yield from types_of(one)


def is_text(schema: Any) -> bool:
    """Whether a value that a model writes without quotes is a string: where nothing else fits."""
    types = set(types_of(schema))
    return not types or "string" in types


def listed(name: str, items: list[tuple[str, bool]], separator: str) -> list[str]:
    """Lark rules of `name`: items in order, some of them required, with separators between them.

    items: (symbol, whether it is required), the required ones first.
    """
    needed = [symbol for symbol, required in items if required]
    others = [symbol for symbol, required in items if not required]
    if needed:
        more = "".join(f" ({separator} {symbol})?" for symbol in others)
        return [f"{name}: {f' {separator} '.join(needed)}{more}"]
    if not others:
        return [f'{name}: ""']
    rules = [f"{name}: {name}_0?"]
    for index, symbol in enumerate(others):
        after = f"{name}_{index + 1}"
        last = index + 1 == len(others)
        rules.append(
            f"{name}_{index}: {symbol}"
            if last
            else f"{name}_{index}: {symbol} ({separator} {after})? | {after}"
        )
    return rules

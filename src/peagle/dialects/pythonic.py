"""Calls as Python: `[f(a=1, b="x"), g()]`, which is a whole answer."""

import ast
import json
import re
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Event
from peagle.dialects.markers import Markers
from peagle.dialects.tools import Argument, ToolUse, listed, types_of

OPENING = re.compile(r"\s*\[\s*([\w.-]*)(\s*\()?")
UNBOUND = {"type", "description", "title", "default", "examples"}
"""Keys of a string's schema that allow any string."""
SINGLE_QUOTED = r"/'([^'\\\n]|\\.)*'/"
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's words, which models mix with Python's."""


class PythonicCalls:
    """`[f(a=1), g()]`, whose calls are shown once the list is complete."""

    name: ClassVar[str] = "pythonic"
    begin: ClassVar[str] = "<|python_start|>"
    end: ClassVar[str] = "<|python_end|>"
    also: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = ()
    bare: ClassVar[str] = r"\["
    separator: ClassVar[str] = ""
    handover: ClassVar[str] = ""

    def reader(self, use: ToolUse, marked: bool) -> "PythonicReader":
        """A reader of one section. Without a marker, a list of other calls is content."""
        return PythonicReader(None if marked else use.names)

    def rules(self, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """Lark rules of a list of calls; a value is Python's, or JSON where both agree."""
        names = [f"call_{index}" for index in range(len(use.tools))]
        more = "" if use.most == 1 else ' (", " one)*'
        rules = [f'call: "[" one{more} "]"', f"one: {' | '.join(names)}"]
        for name, tool in zip(names, use.tools, strict=True):
            rules.append(f'{name}: {json.dumps(tool.name + "(")} {name}_arguments ")"')
            items = []
            for place, argument in enumerate(tool.arguments.values()):
                rules += _argument(f"{name}_{place}", argument)
                items.append((f"{name}_{place}", argument.required))
            rules += listed(f"{name}_arguments", items, '", "')
        return rules


def _argument(symbol: str, argument: Argument) -> list[str]:
    types = set(types_of(argument.schema))
    if types == {"boolean"}:
        return [f'{symbol}: {json.dumps(argument.name + "=")} ("True" | "False")']
    free = types == {"string"} and argument.schema.keys() <= UNBOUND
    value = f"({symbol}_value | {SINGLE_QUOTED})" if free else f"{symbol}_value"
    return [
        f"{symbol}: {json.dumps(argument.name + '=')} {value}",
        f"{symbol}_value: %json {json.dumps(argument.schema)}",
    ]


class PythonicReader:
    """Reads a list of calls.

    known: names of functions, where a list of others is no call; None takes any name.
    """

    def __init__(self, known: Collection[str] | None) -> None:
        self._known = known
        self._tried = 0
        """How much of what is held was tried as a list."""
        self.held = ""
        self.refused = self.within = False

    def feed(self, text: str) -> Iterator[Event]:
        """The calls of the list, once it is complete."""
        self.held += text
        self.refused = not self._may_be_calls()
        while not self.refused and (end := self.held.find("]", self._tried) + 1):
            self._tried = end
            calls = _calls(self.held[:end])
            if calls is not None:
                self.held, self._tried = self.held[end:], 0
                for name, arguments in calls:
                    yield CallBegin(name)
                    yield CallArguments(json.dumps(arguments, ensure_ascii=False))
                    yield CallEnd()
                self.refused = not self._may_be_calls()

    def marker(self, name: str) -> Iterator[Event]:
        """A marker within a list is text of it."""
        return self.feed(name)

    def finish(self) -> Iterator[Event]:
        """A list ends by itself."""
        yield from ()

    def _may_be_calls(self) -> bool:
        opening = OPENING.match(self.held)
        if opening is None:
            return not self.held.strip()
        name, called = opening.groups()
        if self._known is None:
            return called is not None or opening.end() == len(self.held)
        if called is not None:
            return name in self._known
        return opening.end() == len(self.held) and any(one.startswith(name) for one in self._known)


def _calls(text: str) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments of a list of calls; None if it is none, or not complete."""
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(listed, ast.List):
            return None
        return [_call(one) for one in listed.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """One call. Raises `ValueError` for anything else."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    return ast.unparse(node.func), {str(one.arg): _value(one.value) for one in node.keywords}


def _value(node: ast.expr) -> Any:
    """A literal's value. Raises `ValueError` for anything else."""
    match node:
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    json.dumps(value)  # raises what is not JSON's, such as bytes
    return value

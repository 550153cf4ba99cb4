"""Calls as Python: `[f(a=1, b="x"), g()]`, which is a whole answer."""

import ast
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from peagle.dialects.argument_schema import Argument
from peagle.dialects.arguments import ANSWER, as_arguments
from peagle.dialects.events import Event, whole_call
from peagle.dialects.held_calls import HeldCalls
from peagle.dialects.markers import Markers
from peagle.dialects.sections import CallFormat
from peagle.dialects.tools import Tool, ToolUse
from peagle.dialects.value_rules import is_free, object_rules

OPENING = re.compile(r"\s*\[\s*([\w.-]*)(\s*\()?")
SINGLE_QUOTED = r"/'([^'\\\n]|\\.)*'/"
CONSTANTS = {"true": True, "false": False, "null": None}
"""JSON's words, which models mix with Python's."""
CALL = re.compile(r"[\s,]*([\w.-]+)\s*(\(.*\))", re.DOTALL)
"""A name, which may have dashes as no name of Python's has, and its arguments."""

LITERAL = re.compile(r"""('{3}|"{3}|'(?!'')|"(?!""))(?:\\.|(?!\1)[^\\])*\1""", re.DOTALL)
"""A string, and what quotes it."""
PIECE = re.compile(LITERAL.pattern + r"""|[()\[\]{}]|[^'"()\[\]{}]+""", re.DOTALL)
"""A string, a bracket, or what is neither."""
EMPTY = ("", "''", '""')
"""What opens no string; of quotes, a third one may follow that does."""
LINE_END = re.compile(r"\\.|[\r\n]", re.DOTALL)
"""A line end, or a character that is escaped."""
ESCAPED = {"\n": "\\n", "\r": "\\r"}


class PythonicCalls(CallFormat):
    """`[f(a=1), g()]`, whose calls are shown once the list is complete."""

    name, begin, end = "pythonic", "<|python_start|>", "<|python_end|>"
    bare, separator = r"\[", ""

    def reader(self, use: ToolUse, marked: bool) -> "PythonicReader":
        """A reader of one section. Without a marker, a list of other calls is content."""
        return PythonicReader(use, None if marked else use.names)

    def _section(self, either: str, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        more = "" if use.most == 1 else ' (", " one)*'
        return [f'call: "[" one{more} "]"', f"one: {either}"]

    def _call(self, name: str, tool: Tool, markers: Markers) -> list[str]:
        """A value is Python's, or JSON where both agree."""
        arguments = f"{name}_arguments"
        rules = object_rules(arguments, tool.arguments.objects, tool, '", "', _rules)
        return [f'{name}: {json.dumps(tool.name + "(")} {arguments} ")"', *rules]


def _rules(symbol: str, argument: Argument) -> list[str]:
    """Rules of an argument: JSON, and what Python has in its place."""
    schema, opening = argument.schema, json.dumps(f"{argument.name}=")
    if schema.types == {"boolean"}:
        return [f'{symbol}: {opening} ("True" | "False")']
    free = schema.types == {"string"} and any(map(is_free, schema.options))
    value = f"({symbol}_json | {SINGLE_QUOTED})" if free else f"{symbol}_json"
    return [f"{symbol}: {opening} {value}", f"{symbol}_json: %json {json.dumps(schema.closed)}"]


class PythonicReader(HeldCalls):
    """Reads a list of calls, which are shown once it is complete.

    known: names of functions, where a list of others is no call; None takes any name.
    """

    def __init__(self, use: ToolUse, known: Collection[str] | None) -> None:
        super().__init__(use)
        self._known = known
        self._begin()

    def keeps(self, marker: str) -> bool:
        """Whether a marker is text of an argument."""
        return self._quoted

    def _head(self) -> Iterator[Event]:
        self.refused = not self._may_be_calls()
        if self.refused or not (end := self._end()):
            return
        calls = _calls(self.held[:end], self._ends)
        if calls is None:
            self.refused = True
            return
        self.held = self.held[end:]
        self._begin()
        for name, arguments in calls:
            text = json.dumps(arguments, ensure_ascii=False)
            yield from whole_call(name, as_arguments(text, self._use.arguments_of(name)) or "{}")

    def _begin(self) -> None:
        """Expect a list."""
        self._depth = self._followed = self._seen = 0
        """How deep in brackets what was followed of the list ends; how much that is, and how much
        there was to follow."""
        self._quoted = False
        """Whether a string is open behind it."""
        self._ends: list[int] = []
        """Where the list's calls end, as far."""

    def _end(self) -> int:
        """Where the list ends that is held; 0: not yet."""
        new, self._seen = self.held[self._seen :], len(self.held)
        if self._quoted and self.held[self._followed] not in new:
            return 0
        while piece := PIECE.match(self.held, self._followed):
            if piece[0] in EMPTY and piece.end() == len(self.held):
                break
            self._followed = piece.end()
            if piece[0] in "([{":
                self._depth += 1
            elif piece[0] in ")]}":
                self._depth -= 1
                if self._depth == 1:
                    self._ends.append(piece.end())
                elif self._depth == 0 and piece[0] == "]":
                    return piece.end()
        self._quoted = self.held[self._followed :] not in EMPTY
        return 0

    def _may_be_calls(self) -> bool:
        opening = OPENING.match(self.held)
        if opening is None:
            return not self.held.strip()
        name, called = opening.groups()
        begins = called is not None or not self.held[opening.end() :].strip()
        if self._known is None:
            return begins
        if called is not None:
            return name in self._known
        return begins and any(one.startswith(name) for one in self._known)


def _calls(text: str, ends: Sequence[int]) -> list[tuple[str, dict[str, Any]]] | None:
    """Names and arguments of a complete list of calls, given their ends; None if it is none."""
    edges = [text.index("[") + 1, *ends]
    if text[edges[-1] : -1].strip(", \t\r\n"):
        return None
    try:
        return [_call(text[start:end]) for start, end in itertools.pairwise(edges)]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """One call. Raises `ValueError` for anything else."""
    written = CALL.fullmatch(text)
    if written is None:
        raise ValueError("no call")
    name, arguments = written.groups()
    node = ast.parse(f"_{LITERAL.sub(_on_one_line, arguments)}", ANSWER, "eval").body
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    pairs = ((keyword.arg, keyword.value) for keyword in node.keywords)
    values = {argument: _value(value) for argument, value in pairs if argument is not None}
    if len(values) < len(node.keywords):
        raise ValueError("arguments that are unpacked, or given twice")
    return name, values


def _on_one_line(literal: re.Match[str]) -> str:
    """A string that one quote opens without line ends, which Python takes in longer quotes only."""
    if len(literal[1]) > 1:
        return literal[0]
    return LINE_END.sub(lambda found: ESCAPED.get(found[0], found[0]), literal[0])


def _value(node: ast.expr) -> Any:
    """A literal's value. Raises `ValueError` for anything that is not JSON's."""
    match node:
        case ast.Constant(value=str(text)):  # halves of characters are joined, or replaced
            return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case ast.Name(id=name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    value = ast.literal_eval(node)
    if not isinstance(value, int | float | None):
        raise ValueError(f"{value!r} is not JSON's")
    json.dumps(value, allow_nan=False)
    return value

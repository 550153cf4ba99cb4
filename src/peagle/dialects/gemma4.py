"""Calls as Gemma 4 writes them: bare keys, and strings between tokens of their own.

<|tool_call>call:f{city:<|"|>Paris<|"|>,days:2,tags:[<|"|>a<|"|>]}<tool_call|>
"""

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Event
from peagle.dialects.markers import Markers
from peagle.dialects.tools import ToolUse, listed, types_of

QUOTE = '<|"|>'
CALL = "call:"
NAME = re.compile(r"\s*call:([^{]*)(?=\{)")
KEY = re.compile(r"[^\s{}\[\],:]+")
VALUE = re.compile(r"[^\s{}\[\],][^{}\[\],]*")
BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
"""A key that needs no quotes."""


class Gemma4Calls:
    """`call:f{…}` between `<|tool_call>` and `<tool_call|>`."""

    name: ClassVar[str] = "gemma4"
    begin: ClassVar[str] = "<|tool_call>"
    end: ClassVar[str] = "<tool_call|>"
    also: ClassVar[str] = ""
    inner: ClassVar[tuple[str, ...]] = (QUOTE,)
    bare: ClassVar[str] = ""
    separator: ClassVar[str] = "WS?"
    handover: ClassVar[str] = "<|tool_response>"

    def reader(self, use: ToolUse, marked: bool) -> "Gemma4Reader":
        """A reader of one call."""
        return Gemma4Reader()

    def rules(self, use: ToolUse, markers: Markers, opening: str) -> list[str]:
        """Lark rules of a call. Values follow their types: the notation is not JSON."""
        names = [f"call_{index}" for index in range(len(use.tools))]
        quote = markers.rule(QUOTE)
        rules = [
            f'call: {opening} "call:" ({" | ".join(names)}) {markers.rule(self.end)}',
            f"string: {quote} TEXT? {quote}",
            "TEXT: /(?s:.+)/",
            r"number: /-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?/",
            r"integer: /-?[0-9]+/",
            'boolean: "true" | "false"',
            'null: "null"',
            'array: "[" (value ("," value)*)? "]"',
            'object: "{" (key ":" value ("," key ":" value)*)? "}"',
            f"key: /{BARE.pattern}/ | string",
            "value: string | number | boolean | null | array | object",
        ]
        for name, tool in zip(names, use.tools, strict=True):
            rules.append(f'{name}: {json.dumps(tool.name + "{")} {name}_arguments "}}"')
            items = []
            for place, argument in enumerate(tool.arguments.values()):
                symbol = f"{name}_{place}"
                rules.append(
                    f"{symbol}: {json.dumps(argument.name + ':')} {_value(argument.schema, quote)}"
                )
                items.append((symbol, argument.required))
            rules += listed(f"{name}_arguments", items, '","')
        return rules


def _value(schema: Any, quote: str) -> str:
    """The rule of a schema's values, by their types and listed alternatives."""
    options = schema.get("enum") if isinstance(schema, dict) else None
    if options and all(isinstance(option, str) for option in options):
        return "(" + " | ".join(f"{quote} {json.dumps(option)} {quote}" for option in options) + ")"
    types = list(dict.fromkeys(types_of(schema)))
    return f"({' | '.join(types)})" if types else "value"


class Gemma4Reader:
    """Reads calls, and writes their arguments as JSON as they come."""

    def __init__(self) -> None:
        self._quoted = False
        self._open: list[str] = []
        """Brackets of the call's arguments that are not closed."""
        self._at_value = False
        """Whether a value comes next, rather than a key."""
        self.held = ""
        self.within = self.refused = False

    def feed(self, text: str) -> Iterator[Event]:
        """The events that more text makes."""
        if self._quoted:
            yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        self.held += text
        begins = "{" in text
        while self.within or begins:
            if not self.within:
                name = NAME.match(self.held)
                if name is None:
                    break
                self.within, self.held = True, self.held[name.end() :]
                yield CallBegin(name[1].strip())
            yield from self._write(final=False)
            if self.within:
                return
            begins = True
        begun = self.held.lstrip()
        self.refused = not (begun.startswith(CALL) or CALL.startswith(begun))

    def marker(self, name: str) -> Iterator[Event]:
        """A quote, which begins or ends a string."""
        if not self.within:
            yield from self.feed(name)
            return
        if not self._quoted:
            yield from self._write(final=True)
        self._quoted = not self._quoted
        yield CallArguments('"')

    def finish(self) -> Iterator[Event]:
        """A call without its last brace stays as it is."""
        if self.within:
            yield from self._write(final=True)

    def _write(self, final: bool) -> Iterator[Event]:
        """Hand on what is held as JSON; a word at its end may go on, unless `final`."""
        written, place = "", 0
        while place < len(self.held) and self.within:
            word = (VALUE if self._at_value else KEY).match(self.held, place)
            if word is None:
                written += self._take(self.held[place])
                place += 1
            elif word.end() < len(self.held) or final:
                written += _quoted(word[0].rstrip(), key=not self._at_value)
                place = word.end()
            else:
                break
        self.held = self.held[place:]
        if written:
            yield CallArguments(written)
        if not self.within:
            yield CallEnd()

    def _take(self, letter: str) -> str:
        """Go on by a letter of no word, which JSON has, too."""
        if letter in "{[":
            self._open.append(letter)
        elif letter in "}]" and self._open:
            self._open.pop()
            self.within = bool(self._open)
        self._at_value = (
            letter == ":" or "[" in self._open[-1:] or (letter.isspace() and self._at_value)
        )
        return letter


def _quoted(word: str, key: bool) -> str:
    """A bare word as JSON: a key or an unknown word in quotes, a number or a constant as it is."""
    if not key:
        try:
            json.loads(word, parse_constant=int)
        except ValueError:
            return json.dumps(word, ensure_ascii=False)
        return word
    return json.dumps(word, ensure_ascii=False)

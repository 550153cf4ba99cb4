"""Calls as Gemma 4 writes them: bare keys, and strings between tokens of their own.

<|tool_call>call:f{city:<|"|>Paris<|"|>,days:2,tags:[<|"|>a<|"|>]}<tool_call|>
"""

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

from peagle.dialects.events import CallArguments, CallBegin, CallEnd, Event
from peagle.dialects.json_calls import ObjectEnd
from peagle.dialects.markers import Markers
from peagle.dialects.tools import ToolUse, listed, types_of

QUOTE = '<|"|>'
NAME = re.compile(r"\s*call:([^{]*?)\s*(?=\{)")
WORD = re.compile(r"[^\s{}\[\],:]+")
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
    """Reads one call, and writes its arguments as JSON as they come."""

    def __init__(self) -> None:
        self._named = self._quoted = self._ended = False
        self._end = ObjectEnd()
        self.held = ""
        self.refused = False

    @property
    def within(self) -> bool:
        """Whether the call has begun and is not complete."""
        return self._named and not self._ended

    def feed(self, text: str) -> Iterator[Event]:
        """The events that more text makes."""
        if self._quoted:
            yield CallArguments(json.dumps(text, ensure_ascii=False)[1:-1])
            return
        self.held += text
        if not self._named and (name := NAME.match(self.held)):
            self._named, self.held = True, self.held[name.end() :]
            yield CallBegin(name[1])
        if self.within:
            yield from self._write(final=False)

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
        while place < len(self.held) and not self._ended:
            word = WORD.match(self.held, place)
            if word is None:
                letter, place = self.held[place], place + 1
                written += letter
                self._ended = self._end.find(letter) is not None
                continue
            after = self.held[word.end() :].lstrip()
            if not after and not final:
                break
            written += _quoted(word[0], key=after.startswith(":"))
            place = word.end()
        self.held = self.held[place:] if not self._ended else ""
        if written:
            yield CallArguments(written)
        if self._ended:
            yield CallEnd()


def _quoted(word: str, key: bool) -> str:
    """A bare word as JSON: a key or an unknown word in quotes, a number or a constant as it is."""
    if not key:
        try:
            json.loads(word, parse_constant=int)
        except ValueError:
            return json.dumps(word, ensure_ascii=False)
        return word
    return json.dumps(word, ensure_ascii=False)

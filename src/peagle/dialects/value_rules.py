"""Lark rules of arguments that are not written as JSON: text without quotes, and bare keys."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peagle.dialects.argument_schema import ANY, Argument, ArgumentSchema, Option
from peagle.dialects.tools import Tool
from peagle.grammar import whole_pattern
from peagle.sandbox import in_sandbox

RulesOf = Callable[[str, Argument], list[str]]
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
NOT_KEPT = ("patternProperties", "minProperties", "maxProperties", "anyOf")
"""Keywords that these rules leave out; the last one stands for too many alternatives."""
TEXT_BOUNDS = ("enum", "const", "pattern", "minLength", "maxLength", "format")
MOST_VALUES = 1000
"""Most schemas of values whose rules a tool gets; the values of further ones may be any."""
ANY_TEXT = "/(?s:.*)/"
BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
"""A key that needs no quotes."""


def object_rules(
    name: str, options: Sequence[Option], tool: Tool, separator: str, rules_of: RulesOf
) -> list[str]:
    """Rules of `name`: the named values of an object in order, with separators between them.

    rules_of: the rules of a symbol that stands for one of them. Raises `InputError` where a strict
    tool asks for more than rules keep.
    """
    names = [f"{name}_{n}" for n in range(len(options))]
    rules = [f"{name}: {' | '.join(names)}" if names else f'{name}: ""']
    for symbol, option in zip(names, options, strict=True):
        _leave_out(option, tool)
        items = []
        for place, argument in enumerate(option.arguments):
            rules += rules_of(f"{symbol}_value_{place}", argument)
            items.append((f"{symbol}_value_{place}", argument.required))
        rules += _listed(symbol, items, separator)
    return rules


def is_free(option: Option) -> bool:
    """Whether a string may be any."""
    return not any(map(option.given, TEXT_BOUNDS))


def text_terminal(option: Option, tool: Tool) -> str:
    """What a string may be, without its quotes: the right side of a terminal.

    Raises `InputError` as `object_rules`.
    """
    _leave_out(option, tool)
    parts = []
    if option.listed is not None:
        texts = (json.dumps(value) for value in option.listed if isinstance(value, str))
        parts.append(f"({' | '.join(texts)})")
    elif option.given("format"):
        tool.leave_out("format")
    for given in option.given("pattern"):
        if (pattern := in_sandbox(whole_pattern, given)) is None:
            tool.leave_out("pattern")
        else:
            parts.append(pattern)
    parts += [f"/(?s:.{{{least},}})/" for least in option.given("minLength")]
    parts += [f"/(?s:.{{0,{most}}})/" for most in option.given("maxLength")]
    return " & ".join(parts) or ANY_TEXT


class ValueRules:
    """Rules of values with bare keys, and strings between tokens, as Gemma 4 writes them.

    name: with which all rules begin. quote: the symbol on both sides of a string.
    """

    def __init__(self, name: str, tool: Tool, quote: str) -> None:
        self._name, self._tool, self._quote = name, tool, quote
        self._made = 0
        self._symbols: dict[str, str] = {}
        """By the schemas of which they are the values."""
        self._waiting: list[tuple[str, ArgumentSchema]] = []
        """Symbols without rules."""
        self._rules: list[str] = []

    def value(self, schema: ArgumentSchema) -> str:
        """The symbol of a schema's values."""
        key = json.dumps(schema.part)
        if key not in self._symbols:
            if len(self._symbols) == MOST_VALUES:
                self._tool.leave_out("properties")
                return "value"
            self._symbols[key] = f"{self._name}_{len(self._symbols)}"
            self._waiting.append((self._symbols[key], schema))
        return self._symbols[key]

    def rules(self) -> list[str]:
        """The rules of all symbols."""
        while self._waiting:
            symbol, schema = self._waiting.pop()
            either = [rule for option in schema.options for rule in self._either(option)]
            self._rules.append(f"{symbol}: {' | '.join(either)}")
        return self._rules

    def object(self, option: Option) -> str:
        """The right side of a rule of objects."""
        if option.others.options and not option.arguments:  # names are free
            pair = f'key ":" {self.value(option.others)}'
            return f'"{{" ({pair} ("," {pair})*)? "}}"'
        symbol = self._new("object")
        self._rules += object_rules(symbol, [option], self._tool, '","', self._pair)
        return f'"{{" {symbol} "}}"'

    def _pair(self, symbol: str, argument: Argument) -> list[str]:
        return [f"{symbol}: {self._key(argument.name)} {self.value(argument.schema)}"]

    def _either(self, option: Option) -> Iterator[str]:
        """The right sides of a rule of values, by their types."""
        if option.listed is not None:
            yield from map(self._literal, option.listed)
            return
        if option.types == ANY:
            _leave_out(option, self._tool)
            yield "value"
            return
        whole = {"integer"} if "number" in option.types else set()  # a number may be whole
        for kind in sorted(option.types - whole):
            match kind:
                case "null":
                    yield '"null"'
                case "boolean":
                    yield '"true" | "false"'
                case "string":
                    yield self._text(option)
                case "array":
                    yield self._list(option)
                case "object":
                    yield self.object(option)
                case _:
                    bounds = [
                        {key: one[key] for key in NUMBERS if key in one}
                        for one in option.conditions
                    ]
                    yield f"%json {json.dumps({'type': kind, 'allOf': bounds})}"

    def _text(self, option: Option) -> str:
        terminal = self._new("text").upper()
        self._rules.append(f"{terminal}: {text_terminal(option, self._tool)}")
        return f"{self._quote} {terminal} {self._quote}"

    def _list(self, option: Option) -> str:
        least = max(option.given("minItems"), default=0)
        most = min(option.given("maxItems"), default=None)
        first = [self.value(option.item(n)) for n in range(option.first_items)][:most]
        items, rest = ' "," '.join(first), option.item(option.first_items)
        if rest.options and (most is None or most > len(first)):
            one = self.value(rest)
            begin = first or [one]
            left = None if most is None else most - len(begin)
            items = ' "," '.join(begin) + _more(one, max(least - len(begin), 0), left)
            items = items if first or least else f"({items})?"
        return f'"[" {items} "]"'

    def _literal(self, value: Any) -> str:
        """One value."""
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        if isinstance(value, list):
            return _joined(map(self._literal, value), "[", "]")
        if isinstance(value, dict):
            pairs = (f"{self._key(key)} {self._literal(one)}" for key, one in value.items())
            return _joined(pairs, "{", "}")
        return json.dumps(json.dumps(value))

    def _key(self, name: str) -> str:
        bare = BARE.fullmatch(name)
        return json.dumps(f"{name}:") if bare else f'{self._literal(name)} ":"'

    def _new(self, kind: str) -> str:
        self._made += 1
        return f"{self._name}_{kind}_{self._made}"


def _joined(rules: Iterable[str], opening: str, closing: str) -> str:
    return f'"{opening}" ' + ' "," '.join(rules) + f' "{closing}"'


def _more(item: str, least: int, most: int | None) -> str:
    """Further items, each after a comma."""
    return "" if most == 0 else f' ("," {item}){{{least},{"" if most is None else most}}}'


def _leave_out(option: Option, tool: Tool) -> None:
    for keyword in NOT_KEPT:
        if option.given(keyword):
            tool.leave_out(keyword)


def _listed(name: str, items: list[tuple[str, bool]], separator: str) -> list[str]:
    """Lark rules of `name`: items in order, some of them required, with separators between them.

    items: (symbol, whether it is required), the required ones first.
    """
    needed = [symbol for symbol, required in items if required]
    others = [symbol for symbol, required in items if not required]
    if needed:
        more = "".join(f" ({separator} {symbol})?" for symbol in others)
        return [f"{name}: {f' {separator} '.join(needed)}{more}"]
    rules = [f"{name}: {name}_0?" if others else f'{name}: ""']
    for index, symbol in enumerate(others):
        after = f"{name}_{index + 1}"
        more = f" ({separator} {after})? | {after}" if symbol != others[-1] else ""
        rules.append(f"{name}_{index}: {symbol}{more}")
    return rules

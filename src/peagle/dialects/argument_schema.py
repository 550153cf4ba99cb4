"""Schemas of arguments, for readers and grammars: references resolved, alternatives apart."""

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from peagle.schema import MAPS

Conditions = tuple[Mapping[str, Any], ...]
"""Schemas without references and alternatives, all of which a value must fit."""
ANY = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
TYPES: Mapping[str, frozenset[str]] = {
    **{name: frozenset((name,)) for name in ANY},
    **dict.fromkeys(("number", "float", "double"), frozenset(("integer", "number"))),
    **dict.fromkeys(("int", "long"), frozenset(("integer",))),
    "str": frozenset(("string",)),
    "bool": frozenset(("boolean",)),
    "list": frozenset(("array",)),
    "dict": frozenset(("object",)),
}
"""JSON's types, also as other languages call them."""
SIGNS = {
    "object": ("properties", "required", "additionalProperties", "patternProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
"""Keywords that tell which type is meant where none is named."""
DEFINITIONS = ("$defs", "definitions")
SPLIT = ("$ref", "allOf", "anyOf", "oneOf", *DEFINITIONS)
"""Keywords of which conditions are free."""
LEFT_BEHIND = (*DEFINITIONS, "$id", "$anchor", "$schema")
"""Keywords that mean nothing in another document."""
DATA = ("enum", "const", "default", "examples")
"""Keywords whose value is no schema, whatever it looks like."""
MOST = 256
"""Most alternatives of a value; with more, anything may be meant."""


class SchemaDocument:
    """A whole schema, into which the references of its parts point."""

    def __init__(self, whole: Any) -> None:
        self._whole = whole if isinstance(whole, dict) else {}
        self._known: dict[str, list[Conditions]] = {}

    def options(self, part: Any) -> list[Conditions]:
        """The alternatives of a part: a value must fit one of them."""
        if not isinstance(part, dict):
            return [] if part is False else [()]
        plain = {key: value for key, value in part.items() if key not in SPLIT}
        factors: list[list[Conditions]] = [[(plain,)]] if plain else []
        if isinstance(part.get("$ref"), str):
            factors.append(self._referred(part["$ref"]))
        factors += map(self.options, _items(part.get("allOf")))
        for key in ("anyOf", "oneOf"):
            if isinstance(either := part.get(key), list):
                factors.append([one for each in either for one in self.options(each)])
        if math.prod(map(len, factors)) > MOST:
            return [({"anyOf": ()},)]
        return [_together(parts) for parts in itertools.product(*factors)]

    def follow(self, reference: str) -> Any:
        """What a reference points to; anything, where it points to nothing here."""
        base, _, pointer = reference.partition("#")
        found: Any = self._whole
        if (pointer and not pointer.startswith("/")) or base not in ("", found.get("$id")):
            named = (part for key in DEFINITIONS for part in _dict(found.get(key)).values())
            return next((part for part in named if _is_called(part, base, pointer)), True)
        for step in unquote(pointer).split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (LookupError, TypeError, ValueError):
                return True
        return found

    def closed(self, part: Any) -> dict[str, Any]:
        """A part as a document of its own, with what it refers to."""
        names: dict[str, str] = {}
        closed = _dict(_renamed(part, names))
        definitions: dict[str, Any] = {}
        while len(definitions) < len(names):
            reference, name = [*names.items()][len(definitions)]
            definitions[name] = _renamed(self.follow(reference), names)
        return {**closed, "$defs": definitions} if definitions else closed

    def _referred(self, reference: str) -> list[Conditions]:
        if reference not in self._known:
            self._known[reference] = []  # it is no alternative to itself
            self._known[reference] = self.options(self.follow(reference))
        return self._known[reference]


class ArgumentSchema:
    """The schema of an argument, or of all of a function's.

    document: the whole of which `part` is one; None where it is the whole itself.
    """

    def __init__(self, part: Any, document: SchemaDocument | None = None) -> None:
        self.part, self._document = part, document or SchemaDocument(part)
        self._parts: dict[str | int, ArgumentSchema] = {}

    @functools.cached_property
    def options(self) -> "list[Option]":
        """The alternatives of a value."""
        try:
            found = self._document.options(self.part)
        except RecursionError:  # hundreds of references, each to the next
            found = [()]
        options = (Option(one, _types(one), self._document) for one in found)
        return [option for option in options if option.types and option.listed != []]

    @functools.cached_property
    def types(self) -> frozenset[str]:
        """The JSON types of which a value may be."""
        return frozenset[str]().union(*(option.types for option in self.options)) or ANY

    @property
    def objects(self) -> "list[Option]":
        """The alternatives that are objects."""
        return [option for option in self.options if "object" in option.types]

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The values of objects that are named."""
        return frozenset(name for option in self.objects for name in option.names)

    @property
    def closed(self) -> dict[str, Any]:
        """The same as a JSON schema of its own, with what it refers to."""
        return self._document.closed(self.part)

    def of_types(self, types: Iterable[str]) -> "ArgumentSchema":
        """The same for values of some types alone."""
        return ArgumentSchema({"allOf": [self.part, {"type": [*types]}]}, self._document)

    def value(self, name: str) -> "ArgumentSchema":
        """The schema of an object's value."""
        if name not in self._parts:
            naming = [option for option in self.objects if name in option.names]
            parts = [option.value(name).part for option in naming or self.objects]
            self._parts[name] = ArgumentSchema({"anyOf": parts}, self._document)
        return self._parts[name]

    def item(self, place: int) -> "ArgumentSchema":
        """The schema of a list's value."""
        place = min(place, MOST)
        if place not in self._parts:
            lists = (option for option in self.options if "array" in option.types)
            parts = [option.item(place).part for option in lists]
            self._parts[place] = ArgumentSchema({"anyOf": parts}, self._document)
        return self._parts[place]


ANYTHING = ArgumentSchema({})


@dataclass(frozen=True)
class Option:
    """One of the alternatives of a value."""

    conditions: Conditions
    types: frozenset[str]
    document: SchemaDocument

    def given(self, keyword: str) -> list[Any]:
        """What the conditions say by a keyword."""
        return [one[keyword] for one in self.conditions if keyword in one]

    @property
    def listed(self) -> list[Any] | None:
        """The values of `enum` or `const` that are of one of the types; None where none are."""
        lists = [*map(_items, self.given("enum")), *([one] for one in self.given("const"))]
        if not lists:
            return None
        fitting = (value for value in lists[0] if self.types & _type_of(value))
        return [value for value in fitting if all(value in others for others in lists)]

    @property
    def names(self) -> list[str]:
        """The values of an object that are named."""
        return [*dict.fromkeys(name for each in self.given("properties") for name in _dict(each))]

    @property
    def arguments(self) -> "list[Argument]":
        """The named values of an object, those first that are required."""
        required = (name for each in self.given("required") for name in _items(each))
        needed = [name for name in required if isinstance(name, str)]
        known = dict.fromkeys((*self.names, *needed))
        found = [Argument(name, self.value(name), name in needed) for name in known]
        found.sort(key=lambda argument: not argument.required)
        return [argument for argument in found if argument.schema.options]

    def value(self, name: str) -> ArgumentSchema:
        """The schema of an object's value."""
        parts = [
            _dict(one.get("properties")).get(name, one.get("additionalProperties", True))
            for one in self.conditions
        ]
        return ArgumentSchema({"allOf": parts}, self.document)

    @property
    def others(self) -> ArgumentSchema:
        """The schema of an object's values that are not named."""
        parts = [one.get("additionalProperties", True) for one in self.conditions]
        return ArgumentSchema({"allOf": parts}, self.document)

    @property
    def first_items(self) -> int:
        """How many of a list's items have schemas of their own."""
        return max((len(_list_parts(one)[0]) for one in self.conditions), default=0)

    def item(self, place: int) -> ArgumentSchema:
        """The schema of a list's item."""
        parts = map(_list_parts, self.conditions)
        found = [first[place] if place < len(first) else rest for first, rest in parts]
        return ArgumentSchema({"allOf": found}, self.document)


@dataclass(frozen=True)
class Argument:
    """An argument of a function, or another value of an object."""

    name: str
    schema: ArgumentSchema
    required: bool


def _list_parts(schema: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The schemas of a list's first items, and that of the others."""
    items = schema.get("items", True)
    if isinstance(items, list):  # as before 2020
        return items, schema.get("additionalItems", True)
    return _items(schema.get("prefixItems")), items


def _types(conditions: Conditions) -> frozenset[str]:
    """The types of a value that fits; none, where they exclude each other."""
    named = [types for one in conditions if (types := _named_types(one)) is not None]
    if named:
        return frozenset.intersection(*named)
    given = {key for one in conditions for key in one}
    signs = [TYPES[name] for name, keys in SIGNS.items() if not given.isdisjoint(keys)]
    return frozenset[str]().union(*signs) or ANY


def _named_types(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The types that one schema names, or those of the values that it lists."""
    given = schema.get("type")
    names = [name.lower() for name in _items(given) or [given] if isinstance(name, str)]
    values = [*_items(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
    known = [TYPES[name] for name in names if name in TYPES], [_type_of(one) for one in values]
    found = [frozenset[str]().union(*types) for types in known if types]
    if not found:
        return None
    null = TYPES["null"] if schema.get("nullable") is True else frozenset[str]()
    return frozenset.intersection(*found) | null


def _type_of(value: Any) -> frozenset[str]:
    """The types that a value has."""
    match value:
        case None:
            return TYPES["null"]
        case bool():
            return TYPES["boolean"]
        case int() | float():
            return TYPES["number"]
        case str():
            return TYPES["string"]
    return TYPES["array" if isinstance(value, list) else "object"]


def _renamed(part: Any, names: dict[str, str]) -> Any:
    """A part whose references point to definitions, of which each gets a name."""
    if isinstance(part, list):
        return [_renamed(one, names) for one in part]
    if not isinstance(part, dict):
        return part
    renamed: dict[str, Any] = {}
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str):
            renamed[key] = f"#/$defs/{names.setdefault(value, str(len(names)))}"
        elif key in MAPS and isinstance(value, dict):
            renamed[key] = {name: _renamed(one, names) for name, one in value.items()}
        else:
            renamed[key] = value if key in DATA else _renamed(value, names)
    return {key: value for key, value in renamed.items() if key not in LEFT_BEHIND}


def _is_called(part: Any, base: str, name: str) -> bool:
    """Whether a definition has an identifier, or an anchor."""
    called = _dict(part)
    return name == called.get("$anchor") or f"{base}#{name}".rstrip("#") == called.get("$id")


def _together(parts: Iterable[Conditions]) -> Conditions:
    """Conditions that all apply, each once."""
    return tuple({id(one): one for part in parts for one in part}.values())


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}

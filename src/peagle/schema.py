"""JSON schemas as grammars can keep them: what they lack is left out, so that more fits, not less.

Keywords only add conditions, so a schema without one of them accepts all that it did before. The
exceptions are kept in mind: what depends on a keyword goes with it.
"""

import json
import logging
from collections.abc import Callable
from typing import Any

from peagle.config import StructuredOutputs
from peagle.errors import InputError
from peagle.grammar import complaint_about
from peagle.sandbox import in_sandbox

Path = tuple[str, ...]
MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords whose value holds schemas by name."""
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose value is a list of schemas."""
SCHEMAS = ("items", "additionalItems", "additionalProperties")
"""Keywords whose value is a schema."""
APART = {
    "items": ("prefixItems",),
    "additionalItems": ("items",),
    "additionalProperties": ("properties", "patternProperties"),
}
"""Keywords that apply to what some others do not: to more, once those are gone."""
FIRST = ("type", *MAPS, *LISTS, "$ref", "enum", "const", "required", *APART)
"""Keywords that are kept before others, where two do not go together."""
UNSATISFIABLE = "Unsatisfiable schema"
FAULTS = (UNSATISFIABLE, "Invalid type")
"""How complaints begin about what is wrong with a schema, rather than beyond what grammars keep."""
CHECKS = 2000
"""Most parts of a schema that are tried."""
MOST_TOLD = 100
"""Keywords that the log names, each once."""
log = logging.getLogger("peagle.schema")
_told: set[str] = set()


def fit_schema(schema: Any) -> tuple[Any, list[Path]]:
    """A schema that accepts all that `schema` does, perhaps more, and that compiles; and the
    keywords that were left out, by the keys that lead to each.

    One that compiles as it is stays as it is. Raises `InputError` when llguidance is missing.
    """
    try:
        fitted, dropped = in_sandbox(fit_text, json.dumps(schema))
    except RecursionError:
        raise InputError("a JSON schema is nested too deep") from None
    return fitted, [*map(tuple, dropped)]


def kept_schema(schema: Any, strict: bool, what: str) -> Any:
    """The fitted schema; the log names each keyword that is left out, once.

    strict: raise `InputError` instead, naming `what` the schema is of, and the keyword.
    """
    if strict:
        _refuse_faults(schema, what)
    fitted, dropped = fit_schema(schema)
    for path in dropped:
        leave_out(path, strict, what)
    return fitted


def leave_out(path: Path, strict: bool, what: str) -> None:
    """Leave out a keyword that no grammar keeps, as `kept_schema` does."""
    if strict:
        raise InputError(
            f"{what}: no grammar can keep {'.'.join(path)}; leave it out, or do not ask for strict"
        )
    _tell(path[-1] if path else "the schema")


def kept_form(wanted: StructuredOutputs) -> StructuredOutputs:
    """A form whose schema, if it has one, is fitted.

    Raises `InputError` for a schema that is wrong or that nothing fits, and as `kept_schema` does.
    """
    schema = wanted.json_schema
    if schema is None:
        return wanted
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InputError(f"structured outputs: json is not valid JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise InputError("structured outputs: json is a JSON schema, an object or true or false")
    _refuse_faults(schema, "structured outputs")
    fitted = kept_schema(schema, wanted.strict, "structured outputs")
    return wanted.model_copy(update={"json_schema": fitted})


def _refuse_faults(schema: Any, what: str) -> None:
    """Raise `InputError` for a schema that is wrong in itself, as far as one look tells."""
    if schema is False:
        raise InputError(f"{what}: nothing fits the JSON schema false")
    if schema is True:
        return
    try:
        why = in_sandbox(complaint_about, json.dumps(schema))
        if why is not None and why.startswith(UNSATISFIABLE):  # formats only annotate
            why = in_sandbox(complaint_about, json.dumps(_without_formats(schema)))
    except RecursionError:
        raise InputError("a JSON schema is nested too deep") from None
    if why is not None and why.startswith(FAULTS):
        raise InputError(f"{what}: the JSON schema is wrong: {why}")


def _without_formats(schema: Any, path: Path = ()) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key != "format"}
    return {key: within(key, value, _without_formats) for key, value in kept.items()}


def within(key: str, value: Any, change: Callable[[Any, Path], Any], path: Path = ()) -> Any:
    """A keyword's value with each schema in it changed, of which `change` gets the path, too."""
    if key in MAPS and isinstance(value, dict):
        return {name: change(part, (*path, name)) for name, part in value.items()}
    if key in LISTS and isinstance(value, list):
        return [change(part, (*path, str(place))) for place, part in enumerate(value)]
    return change(value, path) if key in SCHEMAS and isinstance(value, dict) else value


def _tell(keyword: str) -> None:
    if keyword not in _told and len(_told) < MOST_TOLD:
        _told.add(keyword)
        log.warning(f"no grammar can keep {keyword[:64]!r} of a JSON schema; it is left out")


def fit_text(text: str) -> tuple[Any, list[Path]]:
    """What fits of a schema in JSON, and what is left out."""
    schema = json.loads(text)
    fitter = _Fitter(schema)
    return fitter.fit(schema, ()), fitter.dropped


class _Fitter:
    """Leaves out of one schema what does not compile, from its innermost parts outwards."""

    def __init__(self, schema: Any) -> None:
        self.dropped: list[Path] = []
        self._left = CHECKS
        given = schema if isinstance(schema, dict) else {}
        self._definitions = {
            key: dict.fromkeys(given[key], True)
            for key in ("$defs", "definitions")
            if isinstance(given.get(key), dict)
        }
        """What a part may refer to, while it is looked at alone."""

    def fit(self, schema: Any, path: Path) -> Any:
        """A schema that compiles alone: keyword by keyword, as long as they go together."""
        if isinstance(schema, bool) or self._compiles(schema):
            return schema
        if not isinstance(schema, dict):
            return self._drop(path)
        kept: dict[str, Any] = {}
        weaker: set[str] = set()
        """Keywords that are gone, or apply to less than before."""
        for key in sorted(schema, key=_turn):
            if weaker.isdisjoint(APART.get(key, ())):
                kept |= self._keyword(key, schema[key], (*path, key), kept)
            else:
                self._drop((*path, key))
            if key not in kept or (key in MAPS and len(kept[key]) < len(schema[key])):
                weaker.add(key)
        # what stands beside a reference may have had no effect
        return {} if "$ref" in weaker else kept

    def _keyword(self, key: str, value: Any, path: Path, beside: dict[str, Any]) -> dict[str, Any]:
        """A keyword that compiles beside others, or nothing."""
        fitted = within(key, value, self.fit, path)
        if key == "patternProperties" and isinstance(fitted, dict):
            wrong = {name for name in fitted if not self._compiles({key: {name: True}})}
            for name in sorted(wrong):
                self._drop((*path, name))
            fitted = {name: part for name, part in fitted.items() if name not in wrong}
        if isinstance(value, float) and value.is_integer():
            fitted = int(value)
        overlaps = key == "oneOf" and fitted != value  # weaker schemas may, and ask for more then
        if not overlaps and self._compiles({**beside, key: fitted}):
            return {key: fitted}
        self._drop(path)
        either = {"anyOf": fitted}
        return either if key == "oneOf" and self._compiles(beside | either) else {}

    def _drop(self, path: Path) -> dict[str, Any]:
        self.dropped.append(path)
        return {}

    def _compiles(self, schema: Any) -> bool:
        self._left -= 1
        if self._left < 0 or not isinstance(schema, dict):
            return False
        return complaint_about({**self._definitions, **schema}) is None


def _turn(key: str) -> int:
    """When a keyword is looked at."""
    return FIRST.index(key) if key in FIRST else len(FIRST)

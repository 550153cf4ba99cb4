"""Schemas that grammars can keep: less is asked for, never something else."""

import json
import logging
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from peagle import schema as module
from peagle.config import StructuredOutputs
from peagle.dialects.tools import Tool, ToolUse
from peagle.errors import InputError
from peagle.grammar import complaint_about
from peagle.schema import fit_schema, kept_form, kept_schema

RECORD = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
"""As zod writes a record."""


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "string", "minLength": 3, "pattern": "^[a-z]+$"},
        {"type": "string", "format": "date"},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [{"$ref": "#/$defs/n"}, {"const": 1}]}}},
        {"description": "a", "default": 1, "examples": [2], "x-own": 3, "nullable": True},
        {"properties": {"propertyNames": {"type": "string"}}, "additionalProperties": False},
    ],
)
def test_what_grammars_keep_stays(schema: Any):
    fitted, dropped = fit_schema(schema)
    assert (fitted, dropped) == (schema, [])
    assert json.dumps(fitted) == json.dumps(schema), "in its order"


@pytest.mark.parametrize(
    ("schema", "kept", "dropped"),
    [
        (RECORD, {"type": "object", "additionalProperties": {}}, ["propertyNames"]),
        ({"not": {"type": "string"}, "type": "string"}, {"type": "string"}, ["not"]),
        ({"if": {}, "then": {}, "else": {}}, {}, ["if", "then", "else"]),
        ({"type": "string", "format": "phone"}, {"type": "string"}, ["format"]),
        ({"type": "string", "pattern": "^(?!-).*$"}, {"type": "string"}, ["pattern"]),
        (
            {"properties": {"a": {"items": RECORD, "uniqueItems": True}}, "required": ["a"]},
            {
                "properties": {"a": {"items": {"type": "object", "additionalProperties": {}}}},
                "required": ["a"],
            },
            ["properties.a.items.propertyNames", "properties.a.uniqueItems"],
        ),
        (
            {"$ref": "#/$defs/r", "$defs": {"r": RECORD}},
            {"$ref": "#/$defs/r", "$defs": {"r": {"type": "object", "additionalProperties": {}}}},
            ["$defs.r.propertyNames"],
        ),
        (
            {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
            {"anyOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]},
            ["oneOf"],
        ),
        ({"type": "string", "minLength": 2.0}, {"type": "string", "minLength": 2}, []),
        ({"type": "any", "description": "a"}, {"description": "a"}, ["type"]),
        ({"type": "object", "properties": None}, {"type": "object"}, ["properties"]),
        ({"required": True, "type": "object"}, {"type": "object"}, ["required"]),
        (
            {"type": "object", "minProperties": 1, "properties": {"a": {}, "b": {}}},
            {"type": "object", "properties": {"a": {}, "b": {}}},
            ["minProperties"],
        ),
        ({"$ref": "https://a.example/b", "maxLength": 3}, {}, ["$ref"]),
        ([], {}, [""]),
    ],
)
def test_what_they_lack_is_left_out_and_named(schema: Any, kept: Any, dropped: list[str]):
    fitted, paths = fit_schema(schema)
    assert fitted == kept
    assert [".".join(path) for path in paths] == dropped
    assert complaint_about(kept) is None


@pytest.mark.parametrize(
    ("schema", "document"),
    [
        (
            {"patternProperties": {"(?!x)": {}, "b": {}}, "additionalProperties": False},
            {"y": 1},
        ),
        ({"patternProperties": {"a": {}, "ab": {}}, "additionalProperties": False}, {"ab": 1}),
        (
            {
                "prefixItems": [{"type": "integer"}, {"minProperties": 1, "properties": {"a": {}}}],
                "items": {"type": "string"},
                "minItems": 10**30,
                "contains": {},
            },
            [1, {"a": 2}, "x"],
        ),
    ],
)
def test_what_would_apply_to_more_goes_too(schema: Any, document: Any):
    assert jsonschema_rs.validator_for(fit_schema(schema)[0]).is_valid(document)


NAMES = st.sampled_from("abc")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, "", "a", "ab", "x-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)
TYPES = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
SIZES = st.integers(0, 3)
PATTERNS = st.sampled_from(["a", "^a", "(?!a)b", "^(?=x)", r"\bb"])
ASSERTIONS: dict[str, st.SearchStrategy[Any]] = {
    "type": TYPES | st.lists(TYPES, min_size=1, max_size=2, unique=True),
    "enum": st.lists(VALUES, min_size=1, max_size=3),
    "const": VALUES,
    "minimum": st.integers(-3, 3),
    "exclusiveMaximum": st.integers(-3, 3),
    "multipleOf": st.integers(1, 3),
    "minLength": SIZES,
    "maxLength": SIZES,
    "pattern": PATTERNS,
    "format": st.sampled_from(["date", "phone", "int32", "byte"]),
    "minItems": SIZES,
    "maxItems": SIZES,
    "uniqueItems": st.booleans(),
    "minProperties": SIZES,
    "maxProperties": SIZES,
    "required": st.lists(NAMES, max_size=2, unique=True),
    "dependentRequired": st.dictionaries(NAMES, st.lists(NAMES, max_size=1), max_size=1),
    "description": st.just("x"),
}


def schemas_of(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(inner, min_size=1, max_size=3)
    named = st.dictionaries(NAMES, inner, max_size=2)
    applicators = {
        "properties": named,
        "patternProperties": st.dictionaries(PATTERNS, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "prefixItems": some,
        "items": inner,
        "contains": inner,
        "allOf": some,
        "anyOf": some,
        "oneOf": some,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "$ref": st.sampled_from(["#", "#/$defs/d", "#/properties/a"]),
        "$defs": st.fixed_dictionaries({"d": inner}),
    }
    return st.fixed_dictionaries({}, optional={**ASSERTIONS, **applicators})


SCHEMAS = st.recursive(
    st.booleans() | st.fixed_dictionaries({}, optional=ASSERTIONS), schemas_of, max_leaves=5
)


@settings(max_examples=200, deadline=None)
@given(schema=SCHEMAS, documents=st.lists(VALUES, min_size=5, max_size=15))
@example({"oneOf": [{"type": "integer"}, {"const": 1, "not": {"const": 1}}]}, [1])
@example({"prefixItems": [{"not": {}}], "items": False}, [[], [1]])
@example({"patternProperties": {"(?!a)b": {}}, "additionalProperties": False}, [{"b": 1}])
def test_what_was_valid_stays_valid(schema: Any, documents: list[Any]):
    fitted, _ = fit_schema(schema)
    assert isinstance(fitted, bool) or complaint_about(fitted) is None
    try:
        before = jsonschema_rs.Draft202012Validator(schema)
        after = jsonschema_rs.Draft202012Validator(fitted)
    except (ValueError, jsonschema_rs.ReferencingError):
        assume(False)
    assert [one for one in documents if before.is_valid(one) and not after.is_valid(one)] == []


def test_a_schema_of_thousands_of_faults_is_fitted_soon():
    many = {f"p{n}": {"type": "string", "pattern": f"(?!{n})"} for n in range(3000)}
    fitted, _ = fit_schema({"type": "object", "properties": many})
    assert complaint_about(fitted) is None


def test_a_schema_nested_too_deep_is_refused():
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InputError, match="nested too deep"):
        fit_schema(deep)


def test_the_log_names_a_keyword_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_told", set())
    with caplog.at_level(logging.WARNING):
        for name in "ab":
            kept_schema({"properties": {name: RECORD}, "not": {}}, False, "it")
    assert caplog.messages == [
        "no grammar can keep 'propertyNames' of a JSON schema; it is left out",
        "no grammar can keep 'not' of a JSON schema; it is left out",
    ]


def test_only_what_is_strict_is_refused_and_named():
    schema = {"type": "object", "properties": {"a": RECORD}}
    fine = Tool("fine", {"type": "object"}, strict=True)
    [_, weaker] = ToolUse((fine, Tool("f", schema))).kept.tools
    assert weaker.schema["properties"]["a"] == {"type": "object", "additionalProperties": {}}
    words = r"^tool f: no grammar can keep properties\.a\.propertyNames; leave it out, or do not"
    with pytest.raises(InputError, match=words):
        _ = ToolUse((fine, Tool("f", schema, strict=True))).kept
    for form in (schema, json.dumps(schema)):
        kept = kept_form(StructuredOutputs(json_schema=form))
        assert kept.json_schema == weaker.schema
        with pytest.raises(InputError, match=r"^structured outputs: .* properties\.a\.property"):
            kept_form(StructuredOutputs(json_schema=form, strict=True))


def test_arguments_of_which_nothing_can_be_kept_are_an_object():
    [tool] = ToolUse((Tool("f", {"not": {}}),)).kept.tools
    assert tool.schema == {"type": "object"}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "objekt"}, "Invalid type: objekt"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, r"Unsatisfiable schema: minimum \(5\)"),
        ({"enum": []}, "Unsatisfiable schema"),
    ],
)
def test_a_wrong_schema_is_refused_and_told_for_a_form(schema: Any, why: str):
    """A tool's is left as far as it goes, since agents send many, unless it is strict."""
    for strict in (False, True):
        form = StructuredOutputs(json_schema=schema, strict=strict)
        with pytest.raises(
            InputError, match=f"structured outputs: the JSON schema is wrong: {why}"
        ):
            kept_form(form)
    with pytest.raises(InputError, match=f"tool f: the JSON schema is wrong: {why}"):
        _ = ToolUse((Tool("f", schema, strict=True),)).kept
    assert len(ToolUse((Tool("f", schema),)).kept.tools) == 1
    with pytest.raises(InputError, match="nothing fits the JSON schema false"):
        kept_form(StructuredOutputs(json_schema="false"))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "string", "maxLength": 10.0},
        {"type": "string", "format": "time", "pattern": r"^([01]\d|2[0-3]):[0-5]\d$"},
        {"type": "string", "format": "date-time", "maxLength": 19},
        {"type": "string", "minLength": None},
        {"type": "object", "properties": None, "required": None},
        {"type": "object", "properties": {"format": {"type": "string"}}},
        {"$ref": "#/components/schemas/B"},
        {"type": ["string", "null"]},
    ],
)
def test_what_serialisers_write_is_taken(part: Any):
    schema = {"type": "object", "properties": {"a": part}, "required": ["a"]}
    assert kept_form(StructuredOutputs(json_schema=schema)).json_schema


def test_a_form_that_is_no_json_is_refused():
    with pytest.raises(InputError, match="json is not valid JSON"):
        kept_form(StructuredOutputs(json_schema="{"))
    assert kept_form(StructuredOutputs(regex="a")) == StructuredOutputs(regex="a")

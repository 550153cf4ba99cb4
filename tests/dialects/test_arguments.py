"""Arguments as models write them become JSON, of the types that their schemas name."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peagle.dialects.argument_schema import ArgumentSchema
from peagle.dialects.arguments import QUOTE_TOKEN, ArgumentsWriter, as_arguments, typed

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
WHOLE = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "s": {"type": "string"},
        "flags": {"type": "array", "items": {"type": "boolean"}},
        "pair": {"prefixItems": [{"type": "string"}], "items": {"$ref": "#/$defs/Limit"}},
        "tree": {"$ref": "#/$defs/Tree"},
        "reused": {"$ref": "#/properties/flags"},
    },
    "$defs": {
        "Point": POINT,
        "Limit": {"type": "integer"},
        "Tree": {
            "type": "object",
            "properties": {"v": {"type": "number"}, "of": {"items": {"$ref": "#/$defs/Tree"}}},
        },
        "Chained": {"$ref": "#/$defs/Limit"},
        "Self": {"$ref": "#/$defs/Self"},
        "Called": {"$anchor": "called", "type": "boolean"},
    },
}


def schema(part: Any) -> ArgumentSchema:
    """A part of a whole with definitions."""
    whole = {**WHOLE, "properties": {**WHOLE["properties"], "p": part}}
    return ArgumentSchema(whole).value("p")


def written(text: str, cuts: list[int], within: ArgumentSchema) -> tuple[str, str, bool]:
    """What is written of a text that comes in pieces, what follows it, and whether it is whole."""
    writer = ArgumentsWriter(within)
    pieces = pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)])
    said = "".join(writer.feed(text[start:end]) for start, end in pieces)
    said += "" if writer.complete else writer.finish()
    return said, writer.held, writer.complete


CUTS = st.lists(st.integers(0, 60), max_size=8)
LETTERS = st.sampled_from(
    [*"\"'\\{}[],: a1\n\té🙂", '", "k": ', "\\u00e9", "\\ud83d", "True", "None", QUOTE_TOKEN]
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.sampled_from('a"\\\n,:{}[]é🙂 ')),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), st.booleans(), CUTS)
def test_json_stays_as_it_stands(values: dict[str, Any], ascii_only: bool, cuts: list[int]):
    for indent in (None, 1):
        text = json.dumps(values, ensure_ascii=ascii_only, indent=indent)
        assert written(f"{text} tail", cuts, ArgumentSchema({})) == (text, " tail", True)


@given(st.lists(LETTERS, max_size=30).map("".join), CUTS)
@example('a": "b" "c": 2}', [])
@example('a": "\\ud83d\\ude', [])
def test_whatever_is_written_becomes_json_that_is_the_same_in_any_pieces(
    text: str, cuts: list[int]
):
    text = "{" + text
    said, rest, complete = written(text, [], schema({}))
    assert (said, rest, complete) == written(text, cuts, schema({}))
    assert (said, rest, complete) == written(text, [*range(60)], schema({}))
    if complete:
        assert isinstance(json.loads(said), dict)
        said.encode()


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('{"a": True, "b": None, "c": [False]}', {"a": True, "b": None, "c": [False]}),
        ("{'a': 'it', \"b\": 'say \"x\"'}", {"a": "it", "b": 'say "x"'}),
        ('{"a": "line\nend\tand\\d"}', {"a": "line\nend\tand\\d"}),
        ('{"a": "\\ud800!", "b": "\\ud83d\\ude00"}', {"a": "\ufffd!", "b": "😀"}),
        ('{"a": [1, 2, ], }', {"a": [1, 2]}),
        ('{"a": "say "hi", he said", "b": 1}', {"a": 'say "hi", he said', "b": 1}),
        ('{"a": "print("b", 1)"}', {"a": 'print("b", 1)'}),
        ('{"a": {"b": [1', {"a": {"b": [1]}}),
        ('{"a": [1, {"b": 2}', {"a": [1, {"b": 2}]}),
        ("{a: b c, d: 0x1F, e: .5}", {"a": "b c", "d": 31, "e": 0.5}),
        ('{"a":, "b"}', {"a": None, "b": None}),
        ('{"a": 1 "b": 2}', {"a": '1 "b": 2'}),
        ('{"a": [] "b": 2}', {"a": [], "b": 2}),
        ('{"a": 1e999, "b": NaN}', {"a": "1e999", "b": "NaN"}),
        ("{}", {}),
    ],
)
def test_what_models_write_instead_of_json(text: str, meant: Any):
    said, _, complete = written(text, [], ArgumentSchema({}))
    assert (json.loads(said), complete) == (meant, True)


@pytest.mark.parametrize("text", ['{"a": "b', '{"a": "b\\', '{"a', '{"a": "\\u12'])
def test_a_string_without_end_is_cut(text: str):
    assert not written(text, [], ArgumentSchema({}))[2]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('{"n": "5", "s": 12}', {"n": 5, "s": "12"}),
        ('{"n": 5.0, "flags": ["true", True, 0]}', {"n": 5, "flags": [True, True, 0]}),
        ('{"n": "five", "s": null}', {"n": "five", "s": None}),
        ('{"pair": [1, "2", "3"]}', {"pair": ["1", 2, 3]}),
        ('{"reused": ["false"]}', {"reused": [False]}),
        ('{"tree": "{\\"v\\": 1}"}', {"tree": {"v": 1}}),
        (
            '{"tree": {"v": "1", "of": [{"v": "2.5", "of": []}]}}',
            {"tree": {"v": 1, "of": [{"v": 2.5, "of": []}]}},
        ),
    ],
)
def test_a_value_of_another_type_that_can_only_be_meant_otherwise(text: str, values: Any):
    for cuts in ([], [*range(60)]):
        said, _, complete = written(text, cuts, ArgumentSchema(WHOLE))
        assert (json.loads(said), complete) == (values, True)


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("part", "text", "value"),
    [
        ({"$ref": "#/$defs/Point"}, '{"x": 1}', {"x": 1}),
        ({"$ref": "#/$defs/Point"}, "{'x': '1'}", {"x": 1}),
        ({"$ref": "#/$defs/Chained", "description": "n"}, "10", 10),
        ({"$ref": "#called"}, "True", True),
        ({"$ref": "#/$defs/Self"}, "10", 10),
        ({"$ref": "#/nowhere"}, "10", 10),
        ({"$ref": "#/properties/flags"}, "[True]", [True]),
        ({"allOf": [{"$ref": "#/$defs/Point"}]}, '{"x": 1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"$ref": "#/$defs/Limit"}, {"type": "string"}]}, "10", 10),
        ({"properties": {"x": {}}}, "{'x': True}", {"x": True}),
        ({"items": {"type": "integer"}}, "[1, 2]", [1, 2]),
        ({"minimum": 1}, "2", 2),
        ({"pattern": "^1"}, "10", "10"),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", "2"]}, "2", "2"),
        ({"enum": ["null"], "type": ["string", "null"]}, "null", "null"),
        ({"const": 5}, "5", 5),
        ({"type": "int"}, "5", 5),
        ({"type": "integer"}, "5.0", 5),
        ({"type": "integer"}, "five", "five"),
        ({"type": "boolean"}, "TRUE", True),
        ({"type": "string"}, "null", "null"),
        ({"type": "string", "nullable": True}, "null", None),
        (OPTIONAL, "null", None),
        (OPTIONAL, "nullify", "nullify"),
        (OPTIONAL, '{"x": 1}', '{"x": 1}'),
        ({"type": ["string", "object"]}, "{'x': True}", {"x": True}),
        ({"type": ["string", "object"]}, "{name}", "{name}"),
        ({}, "[1]", [1]),
        ({}, "a b", "a b"),
        (True, "1.50", 1.5),
    ],
)
def test_a_value_without_quotes_has_the_type_that_its_schema_names(
    part: Any, text: str, value: Any
):
    assert json.loads(typed(text, schema(part))) == value


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        (" null", {}),
        ('{"code": "x"}', {"code": "x"}),
        ("print(1)\n", {"code": "print(1)\n"}),
        ('{"code": "x"', {"code": "x"}),
        ('{"code": "x', None),
        ('{"code": "x"} and more', None),
    ],
)
def test_all_arguments_of_a_call(text: str, values: Any):
    one = ArgumentSchema({"properties": {"code": {"type": "string"}}})
    found = as_arguments(text, one)
    assert (None if found is None else json.loads(found)) == values
    assert as_arguments("print(1)", ArgumentSchema(WHOLE)) is None


def test_schemas_that_lead_on_without_end_are_anything():
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(3000)}
    wide = {"allOf": [{"anyOf": [{"minimum": n}, {"type": "string"}]} for n in range(20)]}
    for part in ({"$ref": "#/$defs/d0", "$defs": chain}, wide):
        assert json.loads(typed("a", ArgumentSchema(part))) == "a"

"""Grammars of answers: what a family writes is allowed, and what a request rules out is not."""

import json
import re
from typing import Any

import pytest
from families import FAMILIES, Calls, Family, encode, prompt, tokenizer
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from peagle.config import ChatConfig
from peagle.dialects.detection import find_dialect
from peagle.dialects.tools import Tool, ToolUse
from peagle.errors import InputError

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = (Tool("get_weather", CITY), Tool("now", EMPTY))
STRICT = tuple(Tool(tool.name, tool.parameters, strict=True) for tool in TOOLS)
CALL = ("get_weather", {"city": 'Paris "center"', "days": 2})
NOW = ("now", {})
FORM = f"%json {json.dumps({**EMPTY, 'properties': {'x': {'type': 'integer'}}, 'required': ['x']})}"
ANSWER = '{"x": 3}'
NAMES = pytest.mark.parametrize("name", FAMILIES)
ONE_CALL = ("gpt-oss",)
"""Families that end their answer with a call."""


@pytest.fixture(scope="module")
def vocabulary() -> Any:
    """llguidance's form of a family's tokenizer, made once."""
    made: dict[str, LLTokenizer] = {}

    def get(name: str) -> LLTokenizer:
        if name not in made:
            own = tokenizer(name)
            ends = [own.convert_tokens_to_ids(end) for end in FAMILIES[name].ends]
            made[name] = from_tokenizer(own, len(own), ends)
        return made[name]

    return get


def takes(vocabulary: Any, name: str, text: str, use: ToolUse | None, form: str | None) -> bool:
    """Whether the grammar of a request takes a whole answer."""
    grammar = find_dialect(tokenizer(name), ChatConfig()).grammar(prompt(name), use, form)
    assert grammar is not None
    matcher = LLMatcher(vocabulary(name), LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = encode(name, text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def write(family: Family, calls: Calls = (), content: str = "", thoughts: str = "Hm.\nSo.") -> str:
    return family.write(thoughts if family.thinks else "", content, calls)


@NAMES
def test_required_calls_come_after_thoughts_and_fit_their_schema(name: str, vocabulary: Any):
    family, use = FAMILIES[name], ToolUse(TOOLS, required=True)
    several = [] if name in ONE_CALL else [[CALL, NOW]]
    for calls in ([CALL], [NOW], [("get_weather", {"city": "Rome"})], *several):
        assert takes(vocabulary, name, write(family, calls), use, None), calls
    wrong = [
        [("other", {})],
        [("get_weather", {"days": 2})],
        [("get_weather", {"city": "Rome", "days": "two"})],
        [("get_weather", {"city": "Rome", "days": 1.5})],
    ]
    for calls in wrong:
        assert not takes(vocabulary, name, write(family, calls), use, None), calls
    assert not takes(vocabulary, name, write(family, content="No."), use, None)


@pytest.mark.parametrize("name", ["plain", "qwen3-coder"])
def test_white_space_before_a_call_comes_to_an_end(name: str, vocabulary: Any):
    """Else a model that knows no calls writes nothing else; it is such as readers trim."""
    call, use = FAMILIES[name].write("", "", [CALL]), ToolUse(TOOLS, required=True)
    assert takes(vocabulary, name, " " * 8 + call, use, None)
    assert not takes(vocabulary, name, " " * 9 + call, use, None)
    assert not takes(vocabulary, name, "\u205f" + call, use, None)


@NAMES
def test_one_call_at_most(name: str, vocabulary: Any):
    use = ToolUse(TOOLS, required=True, most=1)
    assert takes(vocabulary, name, write(FAMILIES[name], [CALL]), use, None)
    assert not takes(vocabulary, name, write(FAMILIES[name], [CALL, NOW]), use, None)


@NAMES
def test_strict_tools_bind_their_arguments_and_leave_the_model_its_choice(
    name: str, vocabulary: Any
):
    family, use = FAMILIES[name], ToolUse(STRICT)
    content = "I will look." if family.talks else ""
    assert takes(vocabulary, name, write(family, content="It is 4."), use, None)
    assert takes(vocabulary, name, write(family, [CALL], content), use, None)
    for wrong in (("get_weather", {"days": 2}), ("other", {})):
        assert not takes(vocabulary, name, write(family, [wrong], content), use, None)


@NAMES
def test_a_form_comes_after_thoughts(name: str, vocabulary: Any):
    family = FAMILIES[name]
    assert takes(vocabulary, name, write(family, content=ANSWER), None, FORM)
    if family.thinks and not family.begun:
        assert takes(vocabulary, name, write(family, content=ANSWER, thoughts=""), None, FORM)
    assert not takes(vocabulary, name, write(family, content="It is 4."), None, FORM)


@NAMES
def test_with_tools_and_a_form_the_answer_is_either(name: str, vocabulary: Any):
    family, use = FAMILIES[name], ToolUse(TOOLS)
    assert takes(vocabulary, name, write(family, content=ANSWER), use, FORM)
    assert takes(vocabulary, name, write(family, [CALL]), use, FORM)
    assert not takes(vocabulary, name, write(family, content="It is 4."), use, FORM)


@NAMES
def test_a_model_that_may_choose_needs_no_grammar(name: str):
    dialect = find_dialect(tokenizer(name), ChatConfig())
    assert dialect.grammar(prompt(name), ToolUse(TOOLS), None) is None
    assert dialect.grammar(prompt(name), None, None) is None


@pytest.mark.sweep
@pytest.mark.parametrize(
    "form", ['"yes" | "no"', "/ye?s/", '%lark {\nstart: "yes" more\nmore: "!"?\n}']
)
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "plain"])
def test_any_kind_of_form_can_follow_thoughts(name: str, form: str, vocabulary: Any):
    assert takes(vocabulary, name, write(FAMILIES[name], content="yes"), None, form)
    assert not takes(vocabulary, name, write(FAMILIES[name], content="maybe"), None, form)


INNER = {
    "type": "object",
    "properties": {
        "x": {"type": "integer"},
        "of": {"type": "array", "items": {"$ref": "#/$defs/I"}},
    },
    "required": ["x"],
    "additionalProperties": False,
}
BOUNDS: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "enum": ({"type": "string", "enum": ["celsius", ""]}, ["celsius", ""], ["fahrenheit"]),
    "mixed enum": ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2, True]),
    "const": ({"const": "on"}, ["on"], ["off"]),
    "pattern": ({"type": "string", "pattern": "^(a|bc)[0-9]$"}, ["a1", "bc2"], ["ab", "xa1"]),
    "part of a pattern": ({"type": "string", "pattern": "[0-9]"}, ["a1b"], ["ab"]),
    "lengths": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
    "items": (
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2},
        [["a"], ["a", "b"]],
        [[], [1], ["a", "b", "c"]],
    ),
    "tuple": (
        {"prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False},
        [["a", 1]],
        [[1, "a"], ["a", 1, 2]],
    ),
    "bounds": ({"type": "integer", "minimum": 10, "maximum": 99}, [10, 99], [9, 100]),
    "inner": (
        {"$ref": "#/$defs/I"},
        [{"x": 1}, {"x": 1, "of": [{"x": 2}]}],
        [{"y": 1}, {}, {"x": "a"}],
    ),
    "nullable": ({"anyOf": [{"$ref": "#/$defs/I"}, {"type": "null"}]}, [None, {"x": 1}], ["a", 1]),
    "text or inner": ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/I"}]}, ["a"], [{"y": 1}]),
    "optional text": (
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        ["a", "nullify", "", None],
        [],
    ),
    "short text or large": (
        {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "integer", "minimum": 10}]},
        ["abc", "1st", 10],
        ["abcd", 5],
    ),
    "reference to a property": ({"$ref": "#/properties/q"}, [3], ["a"]),
    "map": (
        {"type": "object", "additionalProperties": {"type": "integer"}},
        [{"k": 1}, {}],
        [{"k": "a"}],
    ),
}


def with_bound(part: Any, **changes: Any) -> Tool:
    """A tool with one argument; `q` is there for what refers to it."""
    schema = {
        "type": "object",
        "properties": {"p": part, "q": {"type": "integer"}},
        "required": ["p"],
        "additionalProperties": False,
        "$defs": {"I": INNER},
    }
    return Tool("f", schema, **changes)


@pytest.mark.sweep
@NAMES
@pytest.mark.parametrize("bound", BOUNDS)
def test_required_and_strict_calls_keep_to_every_bound(name: str, bound: str, vocabulary: Any):
    part, right, wrong = BOUNDS[bound]
    for use in (
        ToolUse((with_bound(part),), required=True),
        ToolUse((with_bound(part, strict=True),)),
    ):
        for fits, values in ((True, right), (False, wrong)):
            for value in values:
                text = write(FAMILIES[name], [("f", {"p": value})])
                text = text.replace("'", '"') if name == "llama3.2" else text
                text = re.sub(r"\bNone\b", "null", text)
                assert takes(vocabulary, name, text, use, None) == fits, (value, text)


@pytest.mark.sweep
@NAMES
@pytest.mark.parametrize("root", ["$ref", "allOf", "anyOf"])
def test_arguments_are_found_behind_references(name: str, root: str, vocabulary: Any):
    whole = {"$ref": "#/$defs/A"} if root == "$ref" else {root: [{"$ref": "#/$defs/A"}]}
    use = ToolUse((Tool("f", {**whole, "$defs": {"A": CITY}}),), required=True)
    assert takes(vocabulary, name, write(FAMILIES[name], [("f", CALL[1])]), use, None)
    for wrong in ({"days": 2}, {"city": "Rome", "days": "two"}):
        assert not takes(vocabulary, name, write(FAMILIES[name], [("f", wrong)]), use, None)


@pytest.mark.parametrize("name", ["qwen3-coder", "qwen3.5", "gemma4"])
@pytest.mark.parametrize(
    ("part", "keyword"),
    [
        ({"type": "string", "format": "date"}, "format"),
        ({"type": "string", "pattern": "^(?:a$|b)"}, "pattern"),
    ],
)
def test_what_a_dialect_cannot_keep_of_a_strict_tool_is_refused(
    name: str, part: Any, keyword: str, vocabulary: Any
):
    dialect = find_dialect(tokenizer(name), ChatConfig())
    with pytest.raises(InputError, match=f"^tool f: no grammar can keep {keyword}; leave it out"):
        dialect.grammar(prompt(name), ToolUse((with_bound(part, strict=True),)), None)
    use = ToolUse((with_bound(part),), required=True)
    assert takes(vocabulary, name, write(FAMILIES[name], [("f", {"p": "x"})]), use, None)


def test_more_schemas_than_rules_are_kept_for():
    chain = {f"d{n}": {"properties": {"x": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(1200)}
    schema = {"type": "object", "properties": {"p": {"$ref": "#/$defs/d0"}}, "$defs": chain}
    dialect = find_dialect(tokenizer("gemma4"), ChatConfig())
    assert dialect.grammar(prompt("gemma4"), ToolUse((Tool("f", schema),), required=True), None)
    with pytest.raises(InputError, match="tool f: no grammar can keep properties; leave"):
        dialect.grammar(prompt("gemma4"), ToolUse((Tool("f", schema, strict=True),)), None)


@pytest.mark.sweep
@NAMES
@pytest.mark.parametrize("part", [{"enum": []}, {"anyOf": []}, False])
def test_an_argument_that_nothing_fits_is_left_out(name: str, part: Any, vocabulary: Any):
    schema = {"type": "object", "properties": {"p": part, "q": {"type": "integer"}}}
    use = ToolUse((Tool("f", schema),), required=True)
    assert takes(vocabulary, name, write(FAMILIES[name], [("f", {"q": 1})]), use, None)

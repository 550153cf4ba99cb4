"""Grammars of answers: what a family writes is allowed, and what a request rules out is not."""

import json
from typing import Any

import pytest
from families import FAMILIES, Calls, Family, encode, prompt, tokenizer
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from peagle.config import ChatConfig
from peagle.dialects import Tool, ToolUse, find_dialect

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
    if family.thinks and name != "qwen3-thinking":
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


@pytest.mark.parametrize(
    "form", ['"yes" | "no"', "/ye?s/", '%lark {\nstart: "yes" more\nmore: "!"?\n}']
)
@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "plain"])
def test_any_kind_of_form_can_follow_thoughts(name: str, form: str, vocabulary: Any):
    assert takes(vocabulary, name, write(FAMILIES[name], content="yes"), None, form)
    assert not takes(vocabulary, name, write(FAMILIES[name], content="maybe"), None, form)

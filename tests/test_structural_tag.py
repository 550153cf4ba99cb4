"""Structural tags: what each format accepts, what it does not, and what is refused."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from peagle.errors import InputError
from peagle.structural_tag import lark_of

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NUMBER = {"type": "json_schema", "json_schema": SCHEMA}
DIGITS = {"type": "regex", "pattern": "[0-9]+"}
OLD = {
    "structures": [
        {"begin": "<function=f>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=g>", "end": "</function>"},
    ],
    "triggers": ["<function="],
}
F = {"type": "tag", "begin": "<f>", "content": DIGITS, "end": ["</f>", ";"]}
G = {"type": "tag", "begin": "<g>", "content": {"type": "any_text"}, "end": "</g>"}
TOKEN = 7
"""The id of `<call>`, a token of its own."""


def triggered(**changes: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<"], "tags": [F, G], **changes}


def separated(**changes: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "tags": [F, G], "separator": ", ", **changes}


def accepts(tag: dict[str, Any], text: str) -> bool:
    """Whether a whole text fits, in which `<call>` is that token."""
    tokenizer = LLTokenizer("byte")
    lark = lark_of(tag, {"<call>": TOKEN})
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    tokens: list[int] = []
    for index, part in enumerate(text.split("<call>")):
        tokens += [TOKEN] * bool(index) + [*part.encode()]
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("form", "fits", "does_not"),
    [
        ({"type": "const_string", "value": "yes"}, ["yes"], ["no", "yes!"]),
        (NUMBER, ['{"a": 1}'], ['{"a": "x"}', "{}"]),
        (DIGITS, ["12"], ["x", ""]),
        ({"type": "grammar", "grammar": 'root ::= "a" | "b"'}, ["a"], ["c"]),
        ({"type": "any_text"}, ["", "x\n<f>"], []),
        ({"type": "sequence", "elements": [DIGITS, F]}, ["1<f>2</f>"], ["1", "<f>2</f>"]),
        ({"type": "or", "elements": [DIGITS, F]}, ["1", "<f>2;"], ["1<f>2;"]),
        ({"type": "optional", "content": F}, ["", "<f>1;"], ["<f>1;<f>1;"]),
        ({"type": "star", "content": F}, ["", "<f>1;<f>1;"], ["<f>"]),
        ({"type": "plus", "content": F}, ["<f>1;<f>1;"], [""]),
        (G, ["<g>x\ny</g>", "<g></g>"], ["<g>x", "<g></g>y"]),
        (triggered(), ["", "so", "x<f>1;y<g>z</g>"], ["<h>", "x<f>y;", "x<"]),
        (triggered(at_least_one=True), ["x<f>1;y"], ["", "x"]),
        (triggered(stop_after_first=True), ["x<f>1;", "x"], ["x<f>1;y", "x<h"]),
        (separated(), ["", "<f>1;, <g>x</g>"], ["x", "<f>1;<f>1;"]),
        (separated(at_least_one=True, stop_after_first=True), ["<f>1;"], ["", "<f>1;, <f>1;"]),
        (
            {"type": "tag", "begin": "<call>\n", "content": DIGITS, "end": "<call>"},
            ["<call>\n1<call>"],
            ["\n1<call>"],
        ),
        (
            triggered(triggers=["<call>"], tags=[F | {"begin": "<call>f"}]),
            ["x", "x<call>f1;y"],
            ["x<call>y"],
        ),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_formats(form: dict[str, Any], fits: list[str], does_not: list[str]):
    tag = {"type": "structural_tag", "format": form}
    assert [text for text in fits if not accepts(tag, text)] == []
    assert [text for text in does_not if accepts(tag, text)] == []


def test_vllm_s_older_form():
    for text in ("free", 'so <function=f>{"a": 1}</function> and <function=g>[null]</function>'):
        assert accepts(OLD, text)
    for text in ("<function=h>", '<function=f>{"a": "x"}</function>'):
        assert not accepts(OLD, text)


@pytest.mark.parametrize(
    ("tag", "told"),
    [
        ({}, "structural_tag lacks a field, or has a wrong one: 'format'"),
        ({"format": {"value": 1}}, "lacks a field, or has a wrong one: 'type'"),
        ({"format": {"type": "tag", "begin": "x"}}, "lacks a field, or has a wrong one: 'content'"),
        ({"format": {"type": "token", "token": 3}}, 'cannot keep {"type": "token", "token": 3}'),
        ({"format": triggered(excludes=["x"])}, "cannot keep"),
        ({"format": NUMBER | {"style": "qwen_xml"}}, "cannot keep"),
        ({"format": triggered(triggers=["["])}, "no tag begins with '['"),
        ({"format": triggered(triggers=[""])}, "no tag begins with ''"),
        ({"format": {"type": "plus", "content": {"type": "any_text"}}}, "not in this place"),
        ({"format": {"type": "json_schema", "json_schema": False}}, "nothing fits the JSON schema"),
        ({"format": [1]}, "lacks a field, or has a wrong one"),
        (OLD | {"structures": [1]}, "lacks a field, or has a wrong one"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_kept_is_refused_in_one_line(tag: dict[str, Any], told: str):
    with pytest.raises(InputError) as refusal:
        lark_of(tag, {})
    assert told in str(refusal.value)
    assert str(refusal.value).startswith("structured outputs:")
    assert "\n" not in str(refusal.value)

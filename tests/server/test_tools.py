"""Tool calls: what a request may ask for, and parsing answers however they are split."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from peagle.server.errors import APIError
from peagle.server.protocol import ChatBody
from peagle.server.settings import Limits
from peagle.server.tools import ToolParser, ToolUse

TEXTS = st.text(alphabet="ab<tool_cal>/\n{}", max_size=12).filter(lambda t: "<tool_call>" not in t)
CALLS = st.dictionaries(st.sampled_from("xyz"), st.integers() | st.text(max_size=5), max_size=2)


def body(*names: str, **fields: Any) -> ChatBody:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    turns = [{"role": "user", "content": "x"}]
    return ChatBody.model_validate({"messages": turns, "tools": tools, **fields})


def written(arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def fed(parser: ToolParser, pieces: list[str]) -> tuple[str, list[dict[str, Any]]]:
    """The text and calls of an answer that comes in pieces."""
    text, calls = "", []
    for number, piece in enumerate(pieces, start=1):
        shown, new = parser.feed(piece, finished=number == len(pieces))
        text += shown
        calls += new
    return text, calls


@given(
    before=TEXTS,
    calls=st.lists(CALLS, max_size=3),
    after=TEXTS,
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_parts_are_found_however_the_text_is_cut(
    before: str, calls: list[dict[str, Any]], after: str, cuts: list[int]
):
    whole = before + "".join(map(written, calls)) + after
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    pieces = [whole[a:b] for a, b in itertools.pairwise(places)]
    parser = ToolParser(only_calls=False)
    text, found = fed(parser, pieces)
    assert text == (before.rstrip() + after.rstrip() if calls else before + after)
    assert [json.loads(call["function"]["arguments"]) for call in found] == calls
    assert parser.calls == len(calls)
    assert len({call["id"] for call in found}) == len(calls)


@given(text=TEXTS, only_calls=st.booleans(), end=st.integers(0, 150))
def test_an_answer_is_the_same_whole_and_by_the_letter(text: str, only_calls: bool, end: int):
    """Also one that is cut."""
    whole = (f"{text}\n{written({'x': 1})}\n \n{written({})}\n")[:end]
    (shown, calls), (streamed, came) = (
        fed(ToolParser(only_calls), pieces) for pieces in ([whole], [*whole, ""])
    )
    assert shown == streamed
    assert [call["function"] for call in calls] == [call["function"] for call in came]


@pytest.mark.parametrize(
    ("only_calls", "between", "shown"),
    [(True, "\n", ""), (False, " \n", ""), (False, "\nso ", "\nso")],
)
def test_white_space_between_calls_is_no_text(only_calls: bool, between: str, shown: str):
    parser = ToolParser(only_calls)
    pieces = [written({}), between[:1], between[1:], written({"x": 1}), "\n"]
    text, calls = fed(parser, pieces)
    assert (text, len(calls)) == (shown, 2)


def test_arguments_are_told_as_they_were_written():
    """No number is rounded or too long to parse, and no duplicate key is lost."""
    text = '{"x": 12345678901234567890.5, "x": 1e999, "y": ' + "9" * 5000 + "}"
    call = f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>'
    _, [found] = ToolParser(only_calls=True).feed(call, finished=True)
    assert found["function"] == {"name": "f", "arguments": text}


@pytest.mark.parametrize(
    ("only_calls", "start", "rest", "shown"),
    [
        (True, '<tool_call>\n{"na', "me", ""),
        (True, "<tool", "_c", ""),
        (False, 'so: <tool_call>\n{"na', "me", "so:"),
        (False, "a <", "t", "a <t"),
    ],
)
def test_a_call_that_is_cut_is_dropped(only_calls: bool, start: str, rest: str, shown: str):
    parser = ToolParser(only_calls)
    before, _ = parser.feed(start, finished=False)
    after, calls = parser.feed(rest, finished=True)
    assert (before + after, calls) == (shown, [])


@pytest.mark.parametrize(
    ("fields", "required", "most"),
    [
        ({}, False, None),
        ({"tool_choice": "auto", "parallel_tool_calls": False}, False, 1),
        ({"tool_choice": "required"}, True, None),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, True, 1),
        ({"tool_choice": {"type": "function", "name": "g"}}, True, 1),
        ({"tool_choice": "any"}, True, None),
        ({"tool_choice": {"type": "auto"}}, False, None),
        ({"tool_choice": {"type": "any"}}, True, None),
        ({"tool_choice": {"type": "required"}}, True, None),
    ],
)
def test_choices(fields: dict[str, Any], required: bool, most: int | None):
    use = ToolUse.of(body("f", "g", **fields), Limits())
    assert use is not None
    assert (use.required, use.most) == (required, most)


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_no_use_without_tools_or_with_none(choice: Any):
    assert ToolUse.of(body(), Limits()) is None
    assert ToolUse.of(body(tool_choice="auto"), Limits()) is None
    assert ToolUse.of(body("f", tool_choice=choice), Limits()) is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_of_some_tools_leaves_the_others_out(mode: str):
    named = [{"type": "function", "function": {"name": name}} for name in ("h", "f", "other")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    use = ToolUse.of(body("f", "g", "h", tool_choice=allowed), Limits())
    assert use is not None
    assert [tool.function.name for tool in use.tools] == ["f", "h"]
    assert use.required == (mode == "required")


def test_tools_of_other_kinds_are_left_out():
    others = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "x"}}]
    function = {"type": "function", "function": {"name": "f"}, "cache_control": {"type": "x"}}
    turns = [{"role": "user", "content": "x"}]
    given = ChatBody.model_validate({"messages": turns, "tools": [*others, function, *others]})
    assert given.tools is not None
    assert [tool.model_dump(exclude_none=True) for tool in given.tools] == [
        {"type": "function", "function": {"name": "f"}}
    ]
    alone = ChatBody.model_validate({"messages": turns, "tools": others, "tool_choice": "auto"})
    assert ToolUse.of(alone, Limits()) is None


def test_names_of_tools_may_be_long_and_qualified():
    name = "mcp.server/files:read-" + "x" * 106
    assert len(name) == 128
    assert ToolUse.of(body(name), Limits()) is not None
    assert len(ToolUse.of(body(*(f"f{n}" for n in range(200))), Limits()).tools) == 200
    for wrong in (name + "x", "a b", ""):
        with pytest.raises(ValidationError):
            body(wrong)


@pytest.mark.parametrize(
    ("names", "fields", "words"),
    [
        ((), {"tool_choice": "required"}, "needs tools"),
        ((), {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "needs tools"),
        (("f", "f"), {}, "same name"),
        (("f",), {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "called g"),
    ],
)
def test_refusals(names: tuple[str, ...], fields: dict[str, Any], words: str):
    with pytest.raises(APIError, match=words):
        ToolUse.of(body(*names, **fields), Limits())


LONG = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("fields", "accepted", "refused"),
    [
        ({}, ["", "text <b>", LONG, f"so: {LONG}\n{LONG} done"], ['<tool_call>\n{"name": "g"']),
        ({"parallel_tool_calls": False}, ["text", f"so: {LONG}"], [LONG + LONG, LONG + "x"]),
        ({"tool_choice": "required"}, [LONG, LONG + LONG, f"{LONG}\n{LONG}"], ["text", f"a{LONG}"]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            [LONG],
            ["text", LONG + LONG, LONG.replace("{", "[", 1)],
        ),
    ],
)
def test_grammar(fields: dict[str, Any], accepted: list[str], refused: list[str], offline: Any):
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    use = ToolUse.of(body("f", **fields), Limits())
    assert use is not None
    vocabulary = from_tokenizer(offline.tokenizer, offline.engine.vocab_size, [0])

    def takes(text: str) -> bool:
        matcher = LLMatcher(vocabulary, use.grammar)
        tokens = offline.tokenizer(text).input_ids
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    assert [text for text in accepted if not takes(text)] == []
    assert [text for text in refused if takes(text)] == []

"""Tools: what a request may ask for."""

from typing import Any

import pytest
from pydantic import ValidationError

from peagle.server.errors import APIError
from peagle.server.protocol import ChatBody
from peagle.server.settings import Limits
from peagle.server.tools import tool_use


def body(*names: str, **fields: Any) -> ChatBody:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    turns = [{"role": "user", "content": "x"}]
    return ChatBody.model_validate({"messages": turns, "tools": tools, **fields})


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
    use = tool_use(body("f", "g", **fields), Limits())
    assert use is not None
    assert (use.required, use.most) == (required, most)


@pytest.mark.parametrize("choice", ["none", {"type": "none"}])
def test_no_use_without_tools_or_with_none(choice: Any):
    assert tool_use(body(), Limits()) is None
    assert tool_use(body(tool_choice="auto"), Limits()) is None
    assert tool_use(body("f", tool_choice=choice), Limits()) is None


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_of_some_tools_leaves_the_others_out(mode: str):
    named = [{"type": "function", "function": {"name": name}} for name in ("h", "f", "other")]
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    use = tool_use(body("f", "g", "h", tool_choice=allowed), Limits())
    assert use is not None
    assert [tool.name for tool in use.tools] == ["f", "h"]
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
    assert tool_use(alone, Limits()) is None


def test_names_of_tools_may_be_long_and_qualified():
    name = "mcp.server/files:read-" + "x" * 106
    assert len(name) == 128
    assert tool_use(body(name), Limits()) is not None
    many = tool_use(body(*(f"f{n}" for n in range(200))), Limits())
    assert many is not None
    assert len(many.tools) == 200
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
        tool_use(body(*names, **fields), Limits())

"""Tools: what a request may ask for."""

from typing import Any

import pytest

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
    ],
)
def test_choices(fields: dict[str, Any], required: bool, most: int | None):
    use = tool_use(body("f", "g", **fields), Limits())
    assert use is not None
    assert (use.required, use.most) == (required, most)


def test_no_use_without_tools_or_with_none():
    assert tool_use(body(), Limits()) is None
    assert tool_use(body("f", tool_choice="none"), Limits()) is None


@pytest.mark.parametrize(
    ("names", "fields", "words"),
    [
        ((), {"tool_choice": "auto"}, "needs tools"),
        (("f", "f"), {}, "same name"),
        (("f", "g", "h"), {}, "more than 2"),
        (("f",), {"tool_choice": {"type": "function", "function": {"name": "g"}}}, "called g"),
    ],
)
def test_refusals(names: tuple[str, ...], fields: dict[str, Any], words: str):
    with pytest.raises(APIError, match=words):
        tool_use(body(*names, **fields), Limits(tools=2))

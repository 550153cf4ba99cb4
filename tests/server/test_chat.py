"""Chat completions, whole and streamed."""

from typing import Any
from unittest.mock import Mock

import pytest

from peagle.server.chat import ChatForm
from peagle.server.protocol import ChatBody
from peagle.server.settings import Limits
from peagle.server.tools import ToolUse

CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


def form(choice: str) -> ChatForm:
    tools = [{"type": "function", "function": {"name": "f"}}]
    turns = [{"role": "user", "content": "x"}]
    body = ChatBody.model_validate({"messages": turns, "tools": tools, "tool_choice": choice})
    return ChatForm(None, body, ToolUse.of(body, Limits()))


@pytest.mark.parametrize(
    ("choice", "text", "content"),
    [
        ("required", f"{CALL}\n{CALL}", None),
        ("auto", f"{CALL}\n{CALL}\n", None),
        ("auto", f" so:\n{CALL}\n and \n{CALL}", " so:\n and"),
        ("auto", " so:\n", " so:\n"),
    ],
)
def test_white_space_beside_calls_is_the_same_whole_and_streamed(
    choice: str, text: str, content: str | None
):
    ended: Any = Mock(text=text, finish_reason="stop", token_ids=(), logprobs=())
    whole = form(choice).choice(0, ended)["message"]
    streamed, said = form(choice), ""
    for at, letter in enumerate(text, start=1):
        chunk: Any = Mock(text=letter, completion=ended if at == len(text) else None)
        said += streamed.delta(0, chunk)["delta"].get("content", "")
    assert (whole["content"], said) == (content, content or "")

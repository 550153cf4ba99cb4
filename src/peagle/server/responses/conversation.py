"""Items of a conversation as messages: a request as a chat completion's."""

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from peagle.server.delivery import Json
from peagle.server.responses.body import (
    AllowedChoice,
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    Item,
    MessageItem,
    NamedChoice,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
    text_of,
)
from peagle.server.responses.tools import INPUT, ToolName, Tools

ENCODED = "peagle:"
"""Before thoughts in `encrypted_content`, which clients send back without looking into it. They
are encoded but no secret: others' stay unread."""


def chat_fields(body: ResponsesBody, tools: Tools) -> Json:
    """The fields of a chat completion that asks for the same."""
    text, reasoning = body.text, body.reasoning
    fields = {
        **body.shared,
        "messages": list(_messages(body)),
        "max_tokens": body.max_output_tokens,
        "stop": body.stop,
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": text and text.format and _response_format(text.format),
        "verbosity": text and text.verbosity,
        "reasoning_effort": reasoning and reasoning.effort,
        **_tool_fields(body, tools),
    }
    return {name: value for name, value in fields.items() if value is not None}


def encoded(thoughts: str) -> str:
    """Thoughts as `encrypted_content`."""
    return ENCODED + base64.b64encode(thoughts.encode()).decode()


def _decoded(content: str | None) -> str:
    """The thoughts in `encrypted_content`; none in another server's."""
    if content is None or not content.startswith(ENCODED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(ENCODED), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _tool_fields(body: ResponsesBody, tools: Tools) -> Json:
    choice: Any = body.tool_choice
    if isinstance(choice, NamedChoice):
        choice = _named(choice)
    elif isinstance(choice, AllowedChoice):
        allowed = [*map(_named, choice.tools)]
        among = {"mode": choice.mode, "tools": allowed}
        choice = {"type": "allowed_tools", "allowed_tools": among}
    return {"tools": tools.functions or None, "tool_choice": choice}


def _named(tool: NamedChoice) -> Json:
    return {"type": "function", "function": {"name": _flat(tool)}}


def _flat(tool: NamedChoice | FunctionCallItem | CustomCallItem) -> str:
    return ToolName(tool.name, tool.namespace).flat


def _response_format(wanted: TextFormat) -> Json:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    schema = wanted.model_dump(by_alias=True, exclude_none=True, exclude={"type"})
    return {"type": wanted.type, "json_schema": schema}


def _messages(body: ResponsesBody) -> Iterator[Json]:
    """The instructions, then the items: what an answer consisted of is one message."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    turn = _AssistantTurn()
    for item in body.input:
        message = _message(item)
        if message is None:
            turn.add(item)
        else:
            yield from turn.taken()
            yield message
    yield from turn.taken()


def _message(item: Item) -> Json | None:
    """What the client's side says; None for an item of the assistant's, or of nobody's."""
    match item:
        case MessageItem(role=role) if role != "assistant":
            return {"role": role, "content": text_of(item.content)}
        case CallOutputItem():
            told = text_of(item.output, between="\n")
            return {"role": "tool", "tool_call_id": item.call_id, "content": told}
    return None


class _AssistantTurn:
    """The items of one answer, as they come."""

    def __init__(self) -> None:
        self._thoughts: list[str] = []
        self._texts: list[str] = []
        self._calls: list[Json] = []

    def add(self, item: Item) -> None:
        """Take the next item of the answer."""
        match item:
            case MessageItem():
                self._texts.append(text_of(item.content))
            case ReasoningItem():
                said = text_of(item.content) or _decoded(item.encrypted_content)
                self._thoughts.append(said or text_of(item.summary))
            case FunctionCallItem():
                self._call(item, item.arguments)
            case CustomCallItem():
                self._call(item, {INPUT: item.input or ""})

    def taken(self) -> Iterator[Json]:
        """The message of the items so far, if there are any; the next turn begins."""
        if self._thoughts or self._texts or self._calls:
            message: Json = {"role": "assistant", "content": "\n".join(self._texts)}
            if any(self._thoughts):
                message["reasoning_content"] = "\n".join(self._thoughts)
            if self._calls:
                message["tool_calls"] = self._calls
            yield message
        self._thoughts, self._texts, self._calls = [], [], []

    def _call(self, item: FunctionCallItem | CustomCallItem, arguments: Any) -> None:
        function = {"name": _flat(item), "arguments": arguments}
        self._calls.append({"id": item.call_id, "type": "function", "function": function})

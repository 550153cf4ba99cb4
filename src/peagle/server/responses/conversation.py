"""Items of a conversation as messages: a request as a chat completion's."""

import base64
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from peagle.server.delivery import Json
from peagle.server.messages import assistant_message, tool_call
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
    except ValueError:
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
    for is_answer, together in itertools.groupby(body.input, _is_of_answer):
        items = [*together]
        yield from [_answer(items)] if is_answer else map(_message, items)


def _is_of_answer(item: Item) -> bool:
    """Whether an item is part of an answer, rather than what the client's side says."""
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return not isinstance(item, CallOutputItem)


def _message(item: Any) -> Json:
    """What the client's side says: a message, or the result of a call."""
    if isinstance(item, MessageItem):
        return {"role": item.role, "content": text_of(item.content)}
    told = text_of(item.output, between="\n")
    return {"role": "tool", "tool_call_id": item.call_id, "content": told}


def _answer(items: Sequence[Item]) -> Json:
    texts = [text_of(item.content) for item in items if isinstance(item, MessageItem)]
    thoughts = [_thoughts(item) for item in items if isinstance(item, ReasoningItem)]
    calls = [_call(item) for item in items if isinstance(item, FunctionCallItem | CustomCallItem)]
    return assistant_message("\n".join(texts), thoughts, calls)


def _thoughts(item: ReasoningItem) -> str:
    said = text_of(item.content) or _decoded(item.encrypted_content)
    return said or text_of(item.summary)


def _call(item: FunctionCallItem | CustomCallItem) -> Json:
    if isinstance(item, CustomCallItem):
        return tool_call(item.call_id, _flat(item), {INPUT: item.input or ""})
    return tool_call(item.call_id, _flat(item), item.arguments)

"""The messages of a conversation, in every form in which clients send or send back one."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, model_validator
from pydantic_core import PydanticCustomError

from peagle.server.body import LONGEST_NAME, Body, Items
from peagle.server.variants import result_part

TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
    "thinking": None,
    "reasoning": None,
}
"""Kinds of parts, and the field that holds their text; thoughts are no part of the text."""


class FunctionCall(Body):
    """A call the assistant made."""

    name: str
    arguments: Any = None
    """JSON text, or already an object; a client sends back whatever it got."""


class ToolCall(Body):
    """One of an assistant message's calls."""

    id: str | None = None
    type: Literal["function"] | None = "function"
    function: FunctionCall


def _text_kind(kind: str) -> str:
    """Raise for a part that is no text."""
    if kind not in TEXTS:
        told = "{kind} is not supported; this model reads only text"
        raise PydanticCustomError("part", told, {"kind": repr(kind[:LONGEST_NAME])})
    return kind


class ContentPart(Body):
    """A piece of a message or item; only text is supported."""

    type: Annotated[str, AfterValidator(_text_kind)]
    text: str | None = None
    refusal: str | None = None
    thinking: Any = None

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        field = TEXTS[self.type]
        if field is not None and getattr(self, field) is None:
            raise PydanticCustomError("part", "Field required", {"key": field})
        return self

    @property
    def shown(self) -> str:
        """What it adds to the message's text."""
        field = TEXTS[self.type]
        return "" if field is None else getattr(self, field)


class MessageBody(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None
    """OpenAI's former field for the one call of a message."""
    refusal: str | None = None
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None

    @model_validator(mode="before")
    @classmethod
    def _with_result_parts(cls, message: Any) -> Any:
        """A tool's result with texts in place of what is no text."""
        match message:
            case {"role": "tool", "content": [*parts]}:
                return {**message, "content": [result_part(part, TEXTS) for part in parts]}
        return message

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.shown for part in self.content)
        return self.content or self.refusal or ""

    @property
    def turn(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        calls = list(self.tool_calls or ())
        if self.function_call is not None:
            calls.append(ToolCall(function=self.function_call))
        thoughts = (self.reasoning_content, self.reasoning, self.thinking)
        turn = {
            "role": "tool" if self.role == "function" else self.role,
            "content": self.text,
            "name": self.name,
            "tool_calls": [call.model_dump(exclude_none=True) for call in calls] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": next((one for one in thoughts if isinstance(one, str)), None),
        }
        return {key: value for key, value in turn.items() if value is not None}


def tool_call(identifier: str, name: str, arguments: Any) -> dict[str, Any]:
    """One of an assistant message's calls, as JSON."""
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def assistant_message(
    text: str, thoughts: Sequence[str], calls: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """What an assistant said in one turn, as JSON."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})

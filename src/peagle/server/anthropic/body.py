"""The body of `POST /v1/messages` and `/v1/messages/count_tokens`, and its blocks as messages: the
request as a chat completion's."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BeforeValidator, Field

from peagle.server.body import Body, Items, Positive
from peagle.server.delivery import Json
from peagle.server.messages import assistant_message, tool_call
from peagle.server.protocol import TranslatedBody
from peagle.server.tool_body import Function
from peagle.server.variants import KNOWN_TYPE, result_part, usual_type


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ToolReferenceBlock(Body):
    """A tool that a client's search has found; the request's tools describe it."""

    type: Literal["tool_reference"]
    text: str = Field(alias="tool_name")


class SearchResultBlock(Body):
    """A passage that the client has found, with its source."""

    type: Literal["search_result"]
    title: str
    source: str
    content: Items[TextBlock]

    @property
    def text(self) -> str:
        """All that it says."""
        return "\n".join((self.title, self.source, *(block.text for block in self.content)))


class ThinkingBlock(Body):
    """What the model thought in an earlier answer."""

    type: Literal["thinking"]
    thinking: str


class ToolUseBlock(Body):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: Any = None
    """An object; a client sends back whatever it could not read as one, too."""


ResultBlock = Annotated[
    TextBlock | ToolReferenceBlock,
    Field(discriminator="type"),
    BeforeValidator(lambda part: result_part(part, ("text", "tool_reference"))),
]


class ToolResultBlock(Body):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Items[ResultBlock] | None = None


def _refuse(kind: str) -> NoReturn:
    raise ValueError(f"{kind} is not supported; this model reads only text")


class NotText(Body):
    """What no text stands for."""

    type: Annotated[Literal["image", "document"], AfterValidator(_refuse)]


Block = Annotated[
    TextBlock | SearchResultBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock | NotText,
    Field(discriminator="type"),
    KNOWN_TYPE,
]


class Turn(Body):
    """What one side says."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class ClientTool(Function):
    """A tool that the client runs."""

    type: Literal["custom"]
    parameters: dict[str, Any] | None = Field(default=None, alias="input_schema")


class ToolChoice(Body):
    """Whether tools are to be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Body):
    """The form of the answer's text."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputOptions(Body):
    """How the answer is to be."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesBody(TranslatedBody):
    """Anthropic's fields, and some of our own that chat completions have too."""

    messages: Annotated[Items[Turn], Field(min_length=1)]
    system: str | Items[TextBlock] | None = None
    max_tokens: Positive | None = None
    stop_sequences: Items[str] | None = None
    tools: Items[Annotated[ClientTool, usual_type("custom"), KNOWN_TYPE]] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputOptions | None = None
    output_format: OutputFormat | None = None
    """The former place of `output_config`'s format."""


TEXTS = TextBlock | ToolReferenceBlock | SearchResultBlock
"""Blocks with a text for the model."""
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
FOR_ANTHROPIC = "x-anthropic-billing-header:"
"""Begins a part of Claude Code's instructions that is not for the model. It differs from one
conversation to the next, which would then share no cached prefix."""


def chat_fields(body: MessagesBody) -> Json:
    """The fields of a chat completion that asks for the same."""
    wanted = body.output_config
    fields = {
        **body.shared,
        "messages": [*_system(body), *(one for turn in body.messages for one in _messages(turn))],
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "continue_final_message": _begins_answer(body.messages[-1]) or None,
        "reasoning_effort": wanted and wanted.effort,
        **_tool_fields(body),
    }
    form = body.output_format if wanted is None or wanted.format is None else wanted.format
    if form is not None:
        schema = {"schema": form.schema_}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return {name: value for name, value in fields.items() if value is not None}


def _begins_answer(last: Turn) -> bool:
    """Whether the answer goes on where the last turn ends: a text of the assistant's."""
    said = last.content
    ends_in_text = isinstance(said, str) or (said and isinstance(said[-1], TextBlock))
    return last.role == "assistant" and bool(ends_in_text)


def _tool_fields(body: MessagesBody) -> Json:
    functions = [
        {"type": "function", "function": tool.model_dump(exclude_none=True, exclude={"type"})}
        for tool in body.tools or ()
    ]
    fields: Json = {"tools": functions or None}
    choice = body.tool_choice
    if choice is not None:
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = CHOICES.get(choice.type, named)
        fields["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return fields


def _system(body: MessagesBody) -> Iterator[Json]:
    given = body.system
    parts = [given] if isinstance(given, str) else [block.text for block in given or ()]
    text = "\n\n".join(part for part in parts if not part.startswith(FOR_ANTHROPIC))
    if text:
        yield {"role": "system", "content": text}


def _messages(turn: Turn) -> Iterator[Json]:
    """A turn's messages: results of calls are messages of their own."""
    if isinstance(turn.content, str):
        yield {"role": turn.role, "content": turn.content}
    elif turn.role == "assistant":
        yield _assistant(turn.content)
    else:
        yield from _said(turn.role, turn.content)


def _assistant(blocks: Sequence[Block]) -> Json:
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    told = [tool_call(call.id, call.name, call.input) for call in calls]
    return assistant_message(_text(blocks), thoughts, told)


def _said(role: str, blocks: Sequence[Block]) -> Iterator[Json]:
    """The results, which answer the calls before, and then the rest as one message."""
    results = [block for block in blocks if isinstance(block, ToolResultBlock)]
    for result in results:
        given = result.content
        text = given if isinstance(given, str) else _text(given or ())
        yield {"role": "tool", "tool_call_id": result.tool_use_id, "content": text}
    if not results or any(isinstance(block, TEXTS) for block in blocks):
        yield {"role": role, "content": _text(blocks)}


def _text(blocks: Sequence[Any]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TEXTS))

"""The body of `POST /v1/messages`, and of `/v1/messages/count_tokens`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from peagle.server.body import Body, Items, Positive
from peagle.server.protocol import TranslatedBody
from peagle.server.tool_body import Function
from peagle.server.variants import NotText, Other, by_type, result_part


class TextBlock(Body):
    """Text."""

    type: Literal["text"]
    text: str


class ToolReferenceBlock(Body):
    """A tool that a client's search has found; the request's tools describe it."""

    type: Literal["tool_reference"]
    text: str = Field(alias="tool_name")


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


Block = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[NotText, Tag("image")]
    | Annotated[NotText, Tag("document")]
    | Annotated[Other, Tag("other")],
    by_type(("text", "thinking", "tool_use", "tool_result", "image", "document")),
]


class Turn(Body):
    """What one side says."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[Block]


class FunctionTool(Function):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    parameters: dict[str, Any] | None = Field(default=None, alias="input_schema")


Tool = Annotated[
    Annotated[FunctionTool, Tag("custom")] | Annotated[Other, Tag("other")],
    by_type(("custom",), usual="custom"),
]


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
    tools: Items[Tool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputOptions | None = None

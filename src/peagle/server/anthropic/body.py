"""The body of `POST /v1/messages`, and of `/v1/messages/count_tokens`."""

from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BeforeValidator, Field

from peagle.server.body import Body, Items, Positive
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

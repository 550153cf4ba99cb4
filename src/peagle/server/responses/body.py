"""The body of `POST /v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag, field_validator

from peagle.server.body import LONGEST_NAME, Body, Integer, Items, Positive
from peagle.server.protocol import TranslatedBody
from peagle.server.tool_body import Function
from peagle.server.variants import Other, by_type, result_part

TEXT_FIELDS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Kinds of parts, and the field that holds their text."""
NOTHING_KEPT = "no answer is kept here; send earlier items whole, as clients do with store: false"
NO_SCORES = "log-probabilities come with /v1/chat/completions only; leave this out"


class Part(Body):
    """A piece of an item; only text is supported."""

    type: str
    text: str = ""
    refusal: str = ""

    @field_validator("type")
    @classmethod
    def _is_text(cls, kind: str) -> str:
        if kind not in TEXT_FIELDS:
            raise ValueError(f"{kind[:LONGEST_NAME]} is not supported; this model reads only text")
        return kind

    @property
    def shown(self) -> str:
        """What it adds to the item's text."""
        text: str = getattr(self, TEXT_FIELDS[self.type])
        return text


Content = str | Items[Part]
OutputPart = Annotated[Part, BeforeValidator(lambda part: result_part(part, TEXT_FIELDS))]
OutputContent = str | Items[OutputPart]


def text_of(content: Content | None, between: str = "") -> str:
    """A content as one text; `between`: what stands between its parts."""
    return content if isinstance(content, str) else between.join(p.shown for p in content or ())


class MessageItem(Body):
    """What one side says."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None


class ReasoningItem(Body):
    """What the model thought in an earlier answer."""

    type: Literal["reasoning"]
    content: Items[Part] | None = None
    summary: Items[Part] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(Body):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: Any = None
    """JSON text; a client sends back whatever it got."""


class CustomCallItem(Body):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str | None = None


class FunctionOutputItem(Body):
    """The result of a function's call."""

    type: Literal["function_call_output"]
    call_id: str
    output: OutputContent | None = None


class CustomOutputItem(Body):
    """The result of a custom tool's call."""

    type: Literal["custom_tool_call_output"]
    call_id: str
    output: OutputContent | None = None


class ItemReference(Body):
    """An item that the server would have to have kept."""

    type: Literal["item_reference"]

    @field_validator("type")
    @classmethod
    def _refuse(cls, kind: str) -> str:
        raise ValueError(NOTHING_KEPT)


ITEMS = (
    "message",
    "reasoning",
    "function_call",
    "custom_tool_call",
    "function_call_output",
    "custom_tool_call_output",
    "item_reference",
)
Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CustomCallItem, Tag("custom_tool_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[CustomOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[Other, Tag("other")],
    by_type(ITEMS, "message"),
]


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class CustomTool(Body):
    """A tool whose input is text."""

    type: Literal["custom"]
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None
    """Perhaps a grammar of the input, of which the model is told."""


OwnTool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[Other, Tag("other")],
    by_type(("function", "custom")),
]


class NamespaceTool(Body):
    """Several tools whose names are apart from all others'."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Items[OwnTool]


Tool = Annotated[
    Annotated[FunctionTool, Tag("function")]
    | Annotated[CustomTool, Tag("custom")]
    | Annotated[NamespaceTool, Tag("namespace")]
    | Annotated[Other, Tag("other")],
    by_type(("function", "custom", "namespace")),
]


class NamedChoice(Body):
    """The tool to be called."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedChoice(Body):
    """Some of the tools, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"] = "auto"
    tools: Items[NamedChoice | Other]


class TextFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body):
    """How the answer's text is to be."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Body):
    """How long the model is to think, and whether clients see a summary."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """The former name of `summary`."""


class ResponsesBody(TranslatedBody):
    """OpenAI's fields, and some of our own that chat completions have too."""

    input: str | Items[Item]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Items[str] | None = None
    metadata: dict[str, Any] | None = None
    stop: str | Items[str] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    background: bool | None = None
    top_logprobs: Integer | None = None
    store: bool | None = None
    """Nothing is kept here either way."""

    @field_validator("previous_response_id", "conversation", "prompt")
    @classmethod
    def _refuse_kept(cls, value: Any) -> Any:
        if value is not None:
            raise ValueError(NOTHING_KEPT)
        return value

    @field_validator("background")
    @classmethod
    def _refuse_later(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("nothing is kept here to be fetched later; leave it out")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _refuse_scores(cls, value: int | None) -> int | None:
        if value:
            raise ValueError(NO_SCORES)
        return value

    @field_validator("include")
    @classmethod
    def _refuse_included_scores(cls, names: list[str] | None) -> list[str] | None:
        if "message.output_text.logprobs" in (names or ()):
            raise ValueError(NO_SCORES)
        return names

    @property
    def summarizes_thoughts(self) -> bool:
        """Whether the client wants a summary of the thoughts."""
        wanted = self.reasoning or ReasoningOptions()
        return wanted.summary is not None or wanted.generate_summary is not None

    @property
    def carries_thoughts(self) -> bool:
        """Whether `encrypted_content` holds thoughts: for a client that keeps answers itself."""
        return self.store is False or "reasoning.encrypted_content" in (self.include or ())

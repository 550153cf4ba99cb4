"""The body of `POST /v1/responses`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from peagle.server.body import Body, Integer, Items, Positive, refused
from peagle.server.messages import TEXTS, ContentPart
from peagle.server.protocol import TranslatedBody
from peagle.server.tool_body import Function
from peagle.server.variants import KNOWN_TYPE, result_part, usual_type

NOTHING_KEPT = "no answer is kept here; send earlier items whole, as clients do with store: false"
NOTHING_LATER = "nothing is kept here to be fetched later; leave it out"
NO_SCORES = "log-probabilities come with /v1/chat/completions and /v1/completions; leave this out"


Content = str | Items[ContentPart]
OutputPart = Annotated[ContentPart, BeforeValidator(lambda part: result_part(part, TEXTS))]
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
    content: Items[ContentPart] | None = None
    summary: Items[ContentPart] | None = None
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


class CallOutputItem(Body):
    """The result of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: OutputContent | None = None


class ItemReference(Body):
    """An item that the server would have to have kept."""

    type: Annotated[Literal["item_reference"], refused(NOTHING_KEPT)]


Item = Annotated[
    MessageItem
    | ReasoningItem
    | FunctionCallItem
    | CustomCallItem
    | CallOutputItem
    | ItemReference,
    Field(discriminator="type"),
    usual_type("message"),
    KNOWN_TYPE,
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


OwnTool = Annotated[FunctionTool | CustomTool, Field(discriminator="type"), KNOWN_TYPE]


class NamespaceTool(Body):
    """Several tools whose names are apart from all others'."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: Items[OwnTool]


AnyTool = Annotated[
    FunctionTool | CustomTool | NamespaceTool, Field(discriminator="type"), KNOWN_TYPE
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
    tools: Items[Annotated[NamedChoice, KNOWN_TYPE]]


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


def _without_scores(names: list[str] | None) -> list[str] | None:
    if "message.output_text.logprobs" in (names or ()):
        raise ValueError(NO_SCORES)
    return names


class ResponsesBody(TranslatedBody):
    """OpenAI's fields, and some of our own that chat completions have too."""

    input: str | Items[Item]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    tools: Items[AnyTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | AllowedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[Items[str] | None, AfterValidator(_without_scores)] = None
    metadata: dict[str, Any] | None = None
    stop: str | Items[str] | None = None
    previous_response_id: Annotated[str | None, refused(NOTHING_KEPT)] = None
    conversation: Annotated[Any, refused(NOTHING_KEPT)] = None
    prompt: Annotated[Any, refused(NOTHING_KEPT)] = None
    background: Annotated[bool | None, refused(NOTHING_LATER)] = None
    top_logprobs: Annotated[Integer | None, refused(NO_SCORES)] = None
    store: bool | None = None
    """Nothing is kept here either way."""

    @property
    def summarizes_thoughts(self) -> bool:
        """Whether the client wants a summary of the thoughts."""
        wanted = self.reasoning or ReasoningOptions()
        return wanted.summary is not None or wanted.generate_summary is not None

    @property
    def carries_thoughts(self) -> bool:
        """Whether `encrypted_content` holds thoughts: for a client that keeps answers itself."""
        return self.store is False or "reasoning.encrypted_content" in (self.include or ())

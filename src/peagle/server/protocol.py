"""Request bodies: OpenAI's fields, vLLM's additional ones, and `speculation`."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, RootModel

from peagle.config import (
    Bias,
    MinP,
    Penalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopLogprobs,
    TopP,
)

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item is reported, not each of a million."""
Ignored = Annotated[Any, Field(description="Accepted for compatibility; has no effect.")]
ClientsOwn = Annotated[Any, Field(description="Added by OpenAI's clients.", exclude=True)]
"""In messages that they send back: no template may see it."""


class Body(BaseModel):
    """A JSON object without unknown fields and without silent conversions."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """vLLM's field: every chunk carries the token counts so far."""
    include_obfuscation: Ignored = None


class SpeculationOptions(Body):
    """How to speculate on this request."""

    num_speculative_tokens: Count | None = None
    """K, at most the server's; 0 turns speculation off."""
    trace: bool = False
    """Also report which tokens came from the drafter."""


class StructuredOutputsOptions(Body):
    """vLLM's field: the form that the output must have, exactly one of these."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None


class JSONSchema(Body):
    """A named schema."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's field: free text, any JSON object, or JSON that fits a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchema | None = None


class GenerationBody(Body):
    """What completions and chat completions share."""

    model: str | None = None
    """One of the served names; by default the first."""
    n: Positive | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Bias] | None = None
    """Token id -> value added to its logit."""
    seed: int | None = None
    stop: str | Items[str] | None = None
    stop_token_ids: Items[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: Positive | None = None
    min_tokens: Count | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsOptions | None = None
    prompt_logprobs: TopLogprobs | None = None
    """vLLM's field: log-probabilities of the prompt's tokens, and of this many likely ones."""
    speculation: SpeculationOptions | None = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def k(self) -> int | None:
        """Tokens to draft per cycle; None is the server's K."""
        return None if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def prompt_top(self) -> int | None:
        """Likely tokens to find in the place of each of the prompt's; None: score no prompt."""
        return self.prompt_logprobs

    @property
    def traced(self) -> bool:
        """Whether the answer marks which tokens are the drafter's."""
        return self.speculation is not None and self.speculation.trace


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: str | Items[str] | Items[int] | Items[Items[int]]
    echo: bool | None = None
    """Put the prompt before its completion, in the log-probabilities too."""
    max_tokens: Count | None = None
    """0, with `echo` or `prompt_logprobs`, is an answer about the prompt alone."""
    logprobs: TopLogprobs | None = None
    best_of: Positive | None = None
    suffix: str | None = None

    @property
    def prompt_top(self) -> int | None:
        """Those of an echoed prompt too; where nothing is generated, it is scored in any case."""
        least = 0 if self.max_tokens == 0 else None
        echoed = (self.logprobs, least) if self.echo else ()
        wanted = (self.prompt_logprobs, *echoed)
        return max((count for count in wanted if count is not None), default=None)


class FunctionCall(Body):
    """A call the assistant made."""

    name: str
    arguments: str
    parsed_arguments: ClientsOwn = None


class ToolCall(Body):
    """One of an assistant message's calls."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: ClientsOwn = None


class ContentPart(Body):
    """A piece of a message; only text is supported."""

    type: Literal["text"]
    text: str
    cache_control: Ignored = None


class Message(Body):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Ignored = None
    reasoning: Ignored = None
    reasoning_content: Ignored = None
    annotations: ClientsOwn = None
    audio: ClientsOwn = None
    function_call: ClientsOwn = None
    parsed: ClientsOwn = None

    @property
    def text(self) -> str:
        """The content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments."""
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    """The function to be called."""

    name: str


class NamedTool(Body):
    """The tool to be used."""

    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Items[Message], Field(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """More variables for the chat template, such as `enable_thinking`."""
    modalities: Ignored = None
    reasoning_effort: Ignored = None
    verbosity: Ignored = None
    prediction: Ignored = None


class Invocation(RootModel[dict[str, Any]]):
    """SageMaker's body: either of the two above."""


class TokenizeBody(Body):
    """`POST /tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[Message], Field(min_length=1)] | None = None
    tools: Items[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Items[int]

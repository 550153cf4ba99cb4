"""Request bodies: OpenAI's fields, vLLM's additional ones, and `speculation`."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, RootModel, model_validator
from pydantic_core import PydanticCustomError

from peagle import config
from peagle.models.chat_template import RESERVED
from peagle.server.body import Body, Count, Integer, Items, Positive, Refused, Whole
from peagle.server.messages import MessageBody
from peagle.server.tool_body import AllowedTools, PlainChoice, ToolBody, ToolChoice, Tools

Limit = Annotated[
    int | None, Field(ge=-1), AfterValidator(lambda value: None if value == -1 else value), Whole
]
"""A number of tokens; -1 is no limit of one's own."""
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Schema = str | dict[str, Any]
"""A schema, or its JSON text."""


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool | None = None
    """A last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """vLLM's field: every chunk carries the token counts so far."""


class SpeculationOptions(Body):
    """How to speculate on this request."""

    num_speculative_tokens: Count | None = None
    """K, at most the server's; 0 turns speculation off."""
    trace: bool = False
    """Also report which tokens came from the drafter."""


class StructuredOutputsOptions(Body):
    """vLLM's field: the form that the output must have, exactly one of these."""

    json_: Schema | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None
    structural_tag: Schema | None = None


class JSONSchema(Body):
    """A named schema."""

    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's field: free text, any JSON object, or JSON that fits a schema; and vLLM's tags."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JSONSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema where `json_schema` is not given, as some servers take it."""
    format: dict[str, Any] | None = None
    """A structural tag's format, xgrammar's."""
    structures: Items[dict[str, Any]] | None = None
    triggers: Items[str] | None = None
    """A structural tag in vLLM's older form."""


class SharedBody(Body):
    """What the body of every route that generates has, under the same name."""

    model: str | None = None
    """One of the served names; by default the first."""
    stream: bool | None = None
    temperature: config.Temperature | None = None
    top_p: Share | None = None
    """0 is greedy."""
    top_k: Annotated[config.TopK, Whole] | None = None
    min_p: config.MinP | None = None
    repetition_penalty: config.RepetitionPenalty | None = None
    presence_penalty: config.Penalty | None = None
    frequency_penalty: config.Penalty | None = None
    seed: Integer | None = None
    speculation: SpeculationOptions | None = None
    logit_bias: dict[str, config.Bias] | None = None
    """Token id -> value added to its logit."""
    allowed_token_ids: Items[int] | None = None
    """Every other token is ruled out."""
    bad_words: Items[str] | None = None
    """Texts that no token completes."""
    stop_token_ids: Items[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Count | None = None
    skip_special_tokens: bool | None = None
    """Whether special tokens are left out of the text; the default."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), Whole] | None = None
    """Keep only this many tokens from the prompt's end; -1: as many as the context holds."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own, such as a begin of text, to a text."""
    priority: Integer | None = None
    """Its place among waiting requests: those with the lowest number are next."""
    repetition_detection: config.RepetitionDetection | None = None
    """Ends an output that repeats itself."""
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""
    structured_outputs: StructuredOutputsOptions | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Items[str] | None = None
    guided_grammar: str | None = None
    json_schema: Schema | None = None
    regex: str | None = None
    ebnf: str | None = None
    use_beam_search: Refused = None
    prompt_embeds: Refused = None
    logits_processors: Refused = None
    lora_path: Refused = None
    lora_request: Refused = None


class GenerationBody(SharedBody):
    """What completions and chat completions share."""

    n: Positive | None = None
    best_of: Positive | None = None
    stream_options: StreamOptions | None = None
    stop: str | Items[str] | None = None
    max_tokens: Limit = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    """Log-probabilities name tokens as `token_id:7`, which no two share."""
    return_metrics: bool | None = None
    """Each choice tells its times and its seed, under vLLM's names."""
    request_id: str | None = None
    """What the answer's id ends with."""
    stream_interval: Positive | None = None
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[config.TopLogprobs, Whole] | None = None
    """vLLM's field: log-probabilities of the prompt's tokens, and of this many likely ones."""

    @model_validator(mode="after")
    def _best_of_all(self) -> Self:
        if self.best_of not in (None, self.choices):
            told = "not supported other than n; leave it out"
            raise PydanticCustomError("unsupported", told, {"key": "best_of"})
        return self

    @property
    def choices(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def k(self) -> int | None:
        """Tokens to draft per cycle; None is the server's K."""
        return None if self.speculation is None else self.speculation.num_speculative_tokens

    @property
    def asked_tokens(self) -> int | None:
        """Most tokens of an answer; None: the client has not said."""
        return self.max_tokens

    def most_tokens(self, default: int) -> int:
        """The most tokens of an answer; 0 is a length only where the answer is about the prompt."""
        asked = self.asked_tokens
        return default if asked is None or (asked == 0 and self.prompt_top is None) else asked

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
    logprobs: Annotated[config.TopLogprobs, Whole] | None = None
    suffix: Refused = None

    @property
    def prompt_top(self) -> int | None:
        """Those of an echoed prompt too; where nothing is generated, it is scored in any case."""
        least = 0 if self.max_tokens == 0 else None
        echoed = (self.logprobs, least) if self.echo else ()
        wanted = (self.prompt_logprobs, *echoed)
        return max((count for count in wanted if count is not None), default=None)


class Thinking(Body):
    """Whether the model is to think, and how long at most."""

    type: str = "enabled"
    """Or "adaptive", which is on too, or "disabled"."""
    budget_tokens: Count | None = None


def _unreserved(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if taken := sorted(RESERVED & (given or {}).keys()):
        told = "{key} is no variable of a template; leave it out"
        raise PydanticCustomError("reserved", told, {"key": taken[0]})
    return given


class TemplateFields(Body):
    """What a chat template is told: whether the model is to think, and more."""

    thinking: Thinking | bool | None = None
    """Anthropic's field, which others take too."""
    enable_thinking: bool | None = None
    """The same in Qwen's API."""
    thinking_token_budget: Count | None = None
    """Most tokens of thoughts, as vLLM calls it."""
    chat_template_kwargs: Annotated[dict[str, Any] | None, AfterValidator(_unreserved)] = None
    """More variables for the chat template, such as `enable_thinking`."""

    @property
    def thought_tokens(self) -> int | None:
        """Most tokens of thoughts, by either name."""
        if self.thinking_token_budget is None and isinstance(self.thinking, Thinking):
            return self.thinking.budget_tokens
        return self.thinking_token_budget

    @property
    def thinks(self) -> bool | None:
        """Whether thoughts are on; None: the client has not said."""
        if isinstance(self.thinking, Thinking):
            return self.thinking.type != "disabled"
        return self.enable_thinking if self.thinking is None else self.thinking


class Prompting(TemplateFields):
    """How messages become a prompt: what chat completions and `/tokenize` share."""

    tools: Tools | None = None
    documents: Items[dict[str, Any]] | None = None
    """For templates that show documents."""
    add_generation_prompt: bool | None = None
    """Whether the prompt begins the assistant's turn; the default."""
    continue_final_message: bool | None = None
    """Whether the answer goes on where the last message ends."""
    reasoning_effort: str | None = None
    """For templates that know it; "none" turns thoughts off, others turn them on."""
    verbosity: str | None = None
    chat_template: Refused = None
    """The server's own is used; `peagle serve --chat-template` replaces it."""

    @model_validator(mode="after")
    def _begin_or_continue(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            told = "a prompt that continues the last message begins no other; give only one"
            raise PydanticCustomError("both", told, {"key": "add_generation_prompt"})
        return self

    def variables(self, tools: Sequence[ToolBody]) -> dict[str, Any]:
        """What the chat template sees besides the messages, with some of the `tools`."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        described = [tool.model_dump(exclude_none=True) for tool in tools]
        return {
            "add_generation_prompt": begins,
            **({"continue_final_message": True} if continues else {}),
            **({"documents": self.documents} if self.documents else {}),
            **({"tools": described} if described else {}),
            **({"verbosity": self.verbosity} if self.verbosity else {}),
            **self._thoughts(),
            **(self.chat_template_kwargs or {}),
        }

    def _thoughts(self) -> dict[str, Any]:
        """Whether and how hard to think, under each name that templates have for the switch."""
        effort, on = self.reasoning_effort, self.thinks
        if on is None:
            if effort is None:
                return {}
            on = effort != "none"
        effort = effort if on else "none"
        mode = "enabled" if on else "disabled"
        switch = {"enable_thinking": on, "thinking": on, "thinking_mode": mode}
        return {**switch, **({"reasoning_effort": effort} if effort else {})}


class TranslatedBody(SharedBody, TemplateFields):
    """A body of another API, in place of a chat completion's, which has these fields too."""

    n: Literal[1] | None = None
    """These APIs have one answer."""

    @property
    def shared(self) -> dict[str, Any]:
        """Their values."""
        return {name: getattr(self, name) for name in TranslatedBody.model_fields}


class ChatBody(GenerationBody, Prompting):
    """`POST /v1/chat/completions`."""

    messages: Annotated[Items[MessageBody], Field(min_length=1)]
    max_completion_tokens: Limit = None
    logprobs: bool | None = None
    top_logprobs: Annotated[config.TopLogprobs, Whole] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    """Whether the answer shows its thoughts; the default."""
    separate_reasoning: bool | None = None
    """Whether they are apart from its text; the default."""
    echo: Refused = None
    functions: Refused = None
    audio: Refused = None
    modalities: Items[Literal["text"]] | None = None

    @property
    def asked_tokens(self) -> int | None:
        """The most tokens that were asked for; the newer of the two names counts."""
        newer, older = self.max_completion_tokens, self.max_tokens
        return older if newer is None or (newer == 0 and older is not None) else newer

    @model_validator(mode="after")
    def _choose_tools(self) -> Self:
        """Leave the tools that may be used, and one of three words or a name as the choice."""
        choice, tools = self.tool_choice, self.tools
        if isinstance(choice, PlainChoice):
            choice = choice.type
        if isinstance(choice, AllowedTools):
            allowed = {tool.function.name for tool in choice.allowed_tools.tools}
            self.tools = [tool for tool in tools or () if tool.function.name in allowed]
            choice = choice.allowed_tools.mode
        if choice == "any":
            choice = "required"
        self.tool_choice = None if choice == "auto" and not self.tools else choice
        return self


class Invocation(RootModel[dict[str, Any]]):
    """SageMaker's body: either of the two above."""


class TokenizeBody(Prompting):
    """`POST /tokenize`: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[Items[MessageBody], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """Unset: for a text, but not for messages, whose template writes its own."""
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Items[int]

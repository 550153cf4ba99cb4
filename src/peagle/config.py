"""How an engine computes and how a request is answered; `SpeculativeConfig` is found here, too."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from peagle.configuration import Config, NonNegativeInt, PositiveInt
from peagle.speculative_config import SpeculativeConfig as SpeculativeConfig

DType = Literal["auto", "float32", "bfloat16"]
DraftLengthMode = Literal["auto", "fixed"]
Temperature = Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)]
TopK = Annotated[int, Field(ge=-1, lt=2**31)]
TopP = Annotated[float, Field(gt=0.0, le=1.0)]
MinP = Annotated[float, Field(ge=0.0, le=1.0)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]
MAX_LOGPROBS = 20
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
NO_PENALTIES = (1.0, 0.0, 0.0)
"""Repetition, presence and frequency penalties that change nothing."""


class RepetitionDetection(Config):
    """Which repetitions of tokens at an output's end end it. Names and meanings are vLLM's."""

    max_pattern_size: Annotated[int, Field(ge=0, le=256)] = 0
    """Most tokens of what is repeated; 0: nothing ends it."""
    min_pattern_size: NonNegativeInt = 0
    """Fewest; 0 is 1."""
    min_count: NonNegativeInt = 0
    """How often it must stand at the end, one behind another."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size is above max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count must be at least 2; max_pattern_size 0 detects nothing")
        return self

    @property
    def span(self) -> int:
        """Most tokens that tell."""
        return self.max_pattern_size * self.min_count

    def found_in(self, output: Sequence[int]) -> bool:
        """Whether an output ends with a pattern as often."""
        for size in range(max(self.min_pattern_size, 1), self.max_pattern_size + 1):
            if len(output) < size * self.min_count:
                return False
            tail = output[-size * self.min_count :]
            if tail[-1] == tail[-1 - size] and tail[size:] == tail[:-size]:
                return True
        return False


class StructuredOutputs(Config):
    """The form that an output must have: exactly one of these. Names and meanings are vLLM's."""

    model_config = ConfigDict(populate_by_name=True)

    json_schema: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    choice: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """One of these texts."""
    grammar: str | None = None
    """A grammar in Lark's notation, or in GBNF."""
    structural_tag: dict[str, Any] | None = None
    """What must follow certain texts, in either of vLLM's forms: `format`, or `structures` and
    `triggers`."""
    strict: bool = False
    """Whether a schema with a keyword that no grammar can keep is refused; else the keyword is left
    out."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        texts = self.regex, self.choice, self.grammar, self.structural_tag
        kinds = (self.json_schema, self.json_object or None, *texts)
        if sum(kind is not None for kind in kinds) != 1:
            raise ValueError(
                "give exactly one of json, json_object, regex, choice, grammar and structural_tag"
            )
        return self


class SamplingParams(Config):
    """How a request is run: how its tokens are chosen, when it ends, what its text shows.

    Names and meanings are vLLM's.
    """

    temperature: Temperature = 0.0
    """0 is greedy; top_k, top_p and min_p then have no effect."""
    top_k: TopK = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Divides the positive (multiplies the negative) logits of every token in prompt and output."""
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, Bias] = {}
    """Token id -> value added to its logit."""
    allowed_token_ids: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    """Every other token is ruled out, an end of text too."""
    bad_words: tuple[str, ...] = ()
    """Texts whose last token is ruled out where the tokens before it are there."""
    seed: int | None = None
    """Same seed, same tokens, whatever the batch, with or without speculation."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the output; a special token's text stands for that token."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    """Whether the text shows what ended it."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    ignore_eos: bool = False
    prompt_logprobs: TopLogprobs | None = None
    """Log-probabilities of each token of the prompt but the first, and of this many likely ones; no
    key of the prompt then comes from the prefix cache."""
    max_tokens: NonNegativeInt = 128
    """0 generates nothing, where `prompt_logprobs` are all that is wanted."""
    min_tokens: NonNegativeInt = 0
    """Neither an end-of-text nor a stop token before this many output tokens."""
    logprobs: TopLogprobs | None = None
    """Log-probabilities of the chosen token and of this many of the most likely ones."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the output must have; needs the extra `structured`."""
    num_speculative_tokens: NonNegativeInt | None = None
    """K for this request: 0 turns speculation off; unset is the engine's K, also the maximum."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Keep only so many tokens from the prompt's end; -1 keeps as many as leave room for
    `max_tokens`."""
    priority: int = 0
    """Its place among waiting requests: those with the lowest number are next."""
    cache_salt: str | None = None
    """Requests with different salts share no cached prefix."""
    thinking_token_budget: NonNegativeInt | None = None
    """Most tokens of a chat's thoughts, after which they end, where the target's dialect has a
    token for their end. None: no bound."""
    repetition_detection: RepetitionDetection | None = None
    """vLLM's field: end the output where it repeats itself, with the reason `repetition`."""
    unrecorded_from: PositiveInt | None = None
    """For audits: the prefix cache is neither read nor filled, requests without a seed keep theirs,
    and of the prompt only the tokens from here on have log-probabilities."""
    stream_interval: PositiveInt = 1
    """A stream's chunks hold so many tokens, but for its first and its last."""

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _keep_something(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 leaves nothing of the prompt; give -1 or a number above 0")
        return value

    @field_validator("max_tokens")
    @classmethod
    def _generate_for_something(cls, value: int, others: ValidationInfo) -> int:
        if value == 0 and others.data.get("prompt_logprobs") is None:
            raise ValueError("0 generates nothing; give at least 1 (or 0 with prompt_logprobs)")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError(
                "structured outputs end where their form is complete; leave out min_tokens and "
                "ignore_eos"
            )
        return self

    @property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, presence and frequency."""
        return self.repetition_penalty, self.presence_penalty, self.frequency_penalty

    @property
    def penalized(self) -> bool:
        """Whether logits depend on the tokens that came before."""
        return self.penalties != NO_PENALTIES


class ChatConfig(Config):
    """How conversations become prompts, and answers messages. Names are those of vLLM's flags."""

    chat_template: str | None = None
    """A Jinja template in place of the tokenizer's own."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """Variables of the template, which a request may override."""
    tool_call_parser: str | None = None
    """How the target writes calls; unset, its tokenizer and template tell."""
    reasoning_parser: str | None = None
    """How the target writes thoughts; unset, its tokenizer and template tell."""


KVCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]


class EngineConfig(Config):
    """The engine's sizes. Memory is allocated once, at the start."""

    dtype: DType = "auto"
    """auto: bfloat16 on a GPU, float32 on a CPU (where only float32 is exactly reproducible)."""
    device: str = "auto"
    """auto: cuda where there is one, else cpu."""
    max_model_len: PositiveInt | None = None
    """Longest prompt + output in tokens; unset is the target's own limit."""
    block_size: PositiveInt = 16
    """Tokens per block of the KV cache."""
    kv_cache_dtype: KVCacheDType = "auto"
    """fp8, or fp8_e4m3: keys and values are rounded to e4m3, so that memory holds twice as many as
    in 16 bits; auto and bfloat16: they keep the model's type, whatever its files ask for."""
    kv_cache_memory: PositiveInt | None = None
    """Bytes for the KV cache of target and drafter together; unset is 1 GiB on a CPU, and on a GPU
    what `gpu_memory_utilization` leaves after the weights."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of the GPU's memory that may be in use, other processes' included."""
    max_num_seqs: PositiveInt | None = None
    """Most requests that run at once; unset is 64 on a CPU, and on a GPU 64 to 512, as many as the
    KV cache holds 512 tokens of each."""
    max_num_batched_tokens: PositiveInt | None = None
    """Most target rows in one pass; longer prompts are prefilled in chunks. A captured cycle is a
    pass of its own, with as many rows as its requests need. Unset is 8,192 on a GPU and 2,048 on a
    CPU, of which prompts may take 1,024; prompts may take all of a number that is given."""
    enable_prefix_caching: bool = True
    quantize_activations: bool = True
    """Whether dense products of more than 128 rows round their inputs to FP8 on a Hopper GPU, for a
    target in FP8 whose files ask for it. False keeps inputs in 16 bits, as fewer rows' are."""
    batch_invariant: bool = False
    """On a GPU: a request's text depends, to the last bit, neither on drafts nor on what else is in
    flight. Slower, and K is at most 15; without it a near-tie may be decided either way in 16
    bits."""
    draft_length: DraftLengthMode = "auto"
    """auto: a cycle drafts the number of tokens, from none up to K, that gives the most tokens per
    second at the current load; fixed: always K."""
    seed: int | None = None
    """Seeds requests without a seed of their own. Unset is 0, and for a server what the operating
    system draws, so that two of them draw different tokens."""
    lora: str | None = None
    """Directory or hub id of a LoRA adapter in PEFT's layout, merged into the target's weights."""
    step_timeout: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Seconds after which a step counts as stuck, and a server ends; 0: never. Unset is 180 on a
    GPU and 600 on a CPU."""

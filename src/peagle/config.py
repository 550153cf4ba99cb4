"""How an engine computes and how a request is answered; `SpeculativeConfig` is found here, too."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator

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

    def model_post_init(self, _: Any) -> None:
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError("min_pattern_size is above max_pattern_size")
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError("min_count must be at least 2; max_pattern_size 0 detects nothing")

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

    def model_post_init(self, _: Any) -> None:
        kinds = (value for name, value in self if name != "strict")
        if sum(kind not in (None, False) for kind in kinds) != 1:
            raise ValueError(
                "give exactly one of json, json_object, regex, choice, grammar and structural_tag"
            )


def _not_zero(value: int) -> int:
    if value == 0:
        raise ValueError("0 leaves nothing of the prompt; give -1 or a number above 0")
    return value


class SamplingParams(Config):
    """How a request is run: how its tokens are chosen, when it ends, what its text shows.

    Names and meanings are vLLM's.
    """

    temperature: Temperature = 0.0
    """0 is greedy. top_k, top_p and min_p then have no effect."""
    top_k: TopK = 0
    """Sample from the k likeliest; 0 is all. So is -1."""
    top_p: TopP = 1.0
    """Sample from this share of probability; 1 is all."""
    min_p: MinP = 0.0
    """Drop below this share of the likeliest; 0 drops none."""
    repetition_penalty: RepetitionPenalty = 1.0
    """1 is no penalty. Divides the positive (multiplies the negative) logits of every token in
    prompt and output."""
    presence_penalty: Penalty = 0.0
    """0 is no penalty."""
    frequency_penalty: Penalty = 0.0
    """0 is no penalty."""
    logit_bias: dict[int, Bias] = {}
    """Token id -> value added to its logit."""
    allowed_token_ids: Annotated[tuple[int, ...], Field(min_length=1)] | None = None
    """Every other token is ruled out, an end of text too."""
    bad_words: tuple[str, ...] = ()
    """Texts whose last token is ruled out where the tokens before it are there."""
    seed: int | None = None
    """Same seed, same tokens. That holds in any batch, with or without speculation."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end the output; a special token's text stands for that token."""
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    """Whether the text shows what ended it."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""
    ignore_eos: bool = False
    """Write on past the end of text."""
    prompt_logprobs: TopLogprobs | None = None
    """Log-probabilities of each token of the prompt but the first, and of this many likely ones; no
    key of the prompt then comes from the prefix cache."""
    max_tokens: NonNegativeInt = 128
    """Most output tokens. 0 generates nothing, where `prompt_logprobs` are all that is wanted."""
    min_tokens: NonNegativeInt = 0
    """Fewest output tokens. Neither an end of text nor a stop token comes before."""
    logprobs: TopLogprobs | None = None
    """Log-probabilities of the chosen token and of this many of the most likely ones."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the output must have; needs the extra `structured`."""
    num_speculative_tokens: NonNegativeInt | None = None
    """K for this request: 0 turns speculation off; unset is the engine's K, also the maximum."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1), AfterValidator(_not_zero)] | None = None
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

    @field_validator("max_tokens")
    @classmethod
    def _generate_for_something(cls, value: int, others: ValidationInfo) -> int:
        if value == 0 and others.data.get("prompt_logprobs") is None:
            raise ValueError("0 generates nothing; give at least 1 (or 0 with prompt_logprobs)")
        return value

    def model_post_init(self, _: Any) -> None:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}")
        if self.structured_outputs is not None and (self.min_tokens or self.ignore_eos):
            raise ValueError(
                "structured outputs end where their form is complete; leave out min_tokens and "
                "ignore_eos"
            )

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
    """vLLM's name of how calls are written. Unset, tokenizer and template tell.
    Default: as found"""
    reasoning_parser: str | None = None
    """vLLM's name of how thoughts are written. Unset, tokenizer and template tell.
    Default: as found"""


KVCacheDType = Literal["auto", "bfloat16", "fp8", "fp8_e4m3"]


class EngineConfig(Config):
    """The engine's sizes. Memory is allocated once, at the start."""

    dtype: DType = "auto"
    """auto is float32 on a CPU, bfloat16 on a GPU. float32 on a CPU is exactly reproducible."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N. auto is cuda where there is one, else cpu."""
    max_model_len: PositiveInt | None = None
    """Most tokens of prompt and output together. Default: the target's, or what the KV cache
    holds"""
    block_size: PositiveInt = 16
    """Tokens per block of the KV cache."""
    kv_cache_dtype: KVCacheDType = "auto"
    """fp8: keys and values take half of 16 bits' memory; auto: the model's type. fp8, or fp8_e4m3,
    rounds them to e4m3; auto and bfloat16 keep the model's type, whatever its files ask for."""
    kv_cache_memory: PositiveInt | None = None
    """Bytes for the KV cache. It is that of target and drafter together. A GPU leaves what
    `gpu_memory_utilization` holds besides the weights. Default: 1 GiB, or what the GPU leaves"""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] = 0.9
    """Share of the GPU's memory that may be used. What other processes use is part of it."""
    max_num_seqs: PositiveInt | None = None
    """Most requests that run at once. On a GPU it is as many as the KV cache holds 512 tokens of
    each. Default: 64; on a GPU 64 to 512, by its memory"""
    max_num_batched_tokens: PositiveInt | None = None
    """Most target rows in one pass. Longer prompts are prefilled in chunks, which may take all of a
    number that is given. A captured cycle is a pass of its own, with as many rows as its requests
    need. Default: 2048, half of it for prompts; on a GPU 8192"""
    enable_prefix_caching: bool = True
    """Reuse the KV of shared prompt prefixes."""
    quantize_activations: bool = True
    """FP8 on a Hopper GPU: dense products of 65 rows or more round their inputs. That is for a
    target in FP8 whose files ask for it; False keeps inputs in 16 bits, as fewer rows' are."""
    batch_invariant: bool = False
    """On a GPU: the same text to the last bit, whatever else runs; slower. Drafts change nothing
    then, either, and K is at most 15; without it a near-tie may be decided either way in 16
    bits."""
    draft_length: DraftLengthMode = "auto"
    """auto: as many drafts, from none up to K, as are fastest; fixed: K. Which number is fastest
    depends on the load."""
    seed: int | None = None
    """Seed of requests without one. A server has one drawn by the operating system, so that two of
    them draw different tokens. Default: 0; a server draws one"""
    lora: str | None = None
    """LoRA adapter to merge into the target: directory or hub id. Its layout is PEFT's. Default:
    none"""
    step_timeout: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    """Seconds of a step after which the server ends; 0: never. The step counts as stuck. Default:
    600; GPU: 180"""

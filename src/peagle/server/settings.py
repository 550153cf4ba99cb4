"""The server's settings, given once at the start."""

from typing import Annotated, Literal

from pydantic import Field

from peagle.configuration import Config, NonNegativeInt, PositiveInt

NonEmpty = Annotated[str, Field(min_length=1)]
LogFormat = Literal["text", "json"]
ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$"
"""An origin as browsers send it: a scheme, a host and perhaps a port, without a path."""

PLACE = r"^(/[^/\s?#]+)*$"


class Limits(Config):
    """The largest request that is accepted; anything larger is refused with 400 or 413."""

    body_bytes: PositiveInt = 4 << 20
    choices: PositiveInt = 128
    """Prompts times n."""
    stop_strings: PositiveInt = 16
    stop_length: PositiveInt = 1024
    """Characters of one stop string."""
    logit_biases: PositiveInt = 1024
    bad_words: PositiveInt = 1024
    grammar_length: PositiveInt = 64 << 10
    """Characters of a schema (as JSON), regex, grammar, or of all choices together."""
    schema_depth: PositiveInt = 32
    common_multiple: PositiveInt = 100_000
    """Largest common multiple of a schema's `multipleOf`: the states of a number's grammar."""
    logprobs: PositiveInt = 1 << 22
    """Log-probabilities of output in one answer, likely ones included, as if it took all tokens."""
    bad_word_letters: PositiveInt = 64 << 10
    """Characters of all bad words together."""
    prompt_logprobs: PositiveInt = 1 << 18
    """Log-probabilities of prompts in one answer: the prompts' tokens and likely ones in their
    places, times n."""


class ServerSettings(Config):
    """How the server presents itself and what it accepts."""

    model_names: Annotated[tuple[NonEmpty, ...], Field(min_length=1)]
    """Names that requests may use for the model; answers carry the first."""
    api_keys: tuple[NonEmpty, ...] = ()
    """Any of them opens the API; without one it is open to all."""
    allowed_origins: tuple[Annotated[str, Field(pattern=ORIGIN)], ...] = ()
    """Origins of web pages elsewhere that may call the API (CORS); "*" is any."""
    max_queue: NonNegativeInt | None = None
    """Most requests that wait; further ones get 429. Each sequence of a request counts; unset is no
    limit, as in vLLM. Default: no limit"""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """priority: a request's priority says who is next; else who came first."""
    drain_seconds: Annotated[float, Field(ge=0.0)] = 30.0
    """Seconds to finish requests after SIGTERM."""
    timeout_keep_alive: PositiveInt = 180
    """Seconds that a connection without a request stays open: longer than most proxies keep theirs,
    60 to 120 seconds. One that sends a request while the server closes cannot repeat it."""
    log_format: LogFormat = "text"
    """Form of log lines."""
    root_path: Annotated[str, Field(pattern=PLACE)] = ""
    """Path under which a proxy shows the server. In /llm/v1 it is /llm; the proxy may leave it on.
    Default: none"""
    stream_interval: PositiveInt = 1
    """Tokens for which a stream waits between events. Its first one is sent at once."""
    generation_config: Literal["auto", "vllm"] = "auto"
    """vllm: no sampling parameters from the target's generation_config.json."""
    audit: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Share of the answers that are checked, token by token, in time that is free."""
    audit_action: Literal["log", "drain"] = "log"
    """drain: end with exit code 1 after a finding. It ends as by SIGTERM."""
    audit_dump: str | None = None
    """Directory for the tokens of what is found. Default: none"""
    otlp_traces_endpoint: Annotated[str, Field(pattern=r"^https?://\S+$")] | None = None
    """URL to which OpenTelemetry's spans go, by HTTP. Default: none"""
    limits: Limits = Limits()

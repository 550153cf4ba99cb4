"""What comes of a request: chunk by chunk, and as a whole."""

from collections.abc import Iterable
from dataclasses import dataclass

from peagle.dialects.events import Content, Event, Message
from peagle.dialects.parser import Section
from peagle.engine.step import TokenLogprobs
from peagle.errors import InputError
from peagle.speculation import Speculation


@dataclass(frozen=True)
class Completion:
    """A finished request."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    message: Message
    """What they say: of a completion content only, of a chat also thoughts and tool calls."""
    finish_reason: str
    """stop, length, repetition, abort or error."""
    speculation: Speculation
    logprobs: tuple[TokenLogprobs, ...]
    token_times: tuple[float, ...]
    """Seconds from the request's arrival to each output token."""
    queued: float
    """Seconds from arrival until it first ran."""
    cached_tokens: int
    """Tokens of the prompt that the prefix cache already held."""
    seed: int = 0
    """By which its tokens were drawn."""
    sections: tuple[Section, ...] = ()
    """What each of `token_ids` belongs to."""
    events: tuple[Event, ...] = ()
    """The same as `message`, in the order in which it was said."""
    stop_string: str | None = None
    """The stop string that ended it."""
    failure: str | None = None
    """Why it failed, where `finish_reason` is error."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each of `prompt_token_ids`, if requested: None for the first, which follows nothing.
    Fewer where the request ended within its prompt."""
    replica: int = 0
    """Which of several engines ran it."""

    @property
    def is_cut(self) -> bool:
        """Whether its model would have gone on."""
        return self.finish_reason in ("length", "repetition")

    @property
    def text(self) -> str:
        """The content."""
        return self.message.content

    @property
    def seconds(self) -> dict[str, float]:
        """Its times, by vLLM's names: in the queue, from there to its first token (prefill), from
        there to its last one (decode), and both together (inference)."""
        times = self.token_times or (self.queued,)
        inference, decode = times[-1] - self.queued, times[-1] - times[0]
        prefill = inference - decode
        return {"queue": self.queued, "prefill": prefill, "decode": decode, "inference": inference}


@dataclass(frozen=True)
class Chunk:
    """What one step, or several whose outputs came together, added to one request."""

    request_id: str
    events: tuple[Event, ...]
    """What became readable."""
    token_ids: tuple[int, ...]
    sections: tuple[Section, ...]
    """What each of `token_ids` belongs to."""
    drafted: tuple[bool, ...]
    """Which of `token_ids` are accepted drafts."""
    logprobs: tuple[TokenLogprobs, ...]
    """One for each of `token_ids`, if requested."""
    prompt_logprobs: tuple[TokenLogprobs | None, ...]
    """As in `Completion`, in a request's first chunk; none in the others."""
    completion: Completion | None
    """The whole request, once finished."""
    refused: int
    """Drafts of these cycles that were not accepted."""
    replica: int = 0
    """Which of several engines runs the request."""

    @property
    def accepted(self) -> int:
        """How many of `token_ids` are accepted drafts; of one step's they are the first."""
        return sum(self.drafted)

    @property
    def text(self) -> str:
        """What was added to the content."""
        return "".join(event.text for event in self.events if isinstance(event, Content))


def check_finished(completions: Iterable[Completion]) -> None:
    """Raise `InputError` for the first completion that ended with an error."""
    for index, completion in enumerate(completions, start=1):
        if completion.failure is not None:
            raise InputError(f"prompt {index} ended with an error: {completion.failure}")

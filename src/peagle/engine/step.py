"""What the scheduler asks of a worker, and what comes back: plain values, no requests, no tensors.

A request is its *table row* here, which is its own from `Begin` until a step names it in `left`.
What is made for every request in every step is a msgspec struct: that takes a fraction of the time.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec

from peagle.config import SamplingParams

MOST_UNSEEN = 256
"""Most positions with the target's keys that wait for a drafter while a request goes on without
drafts. Before they are more, one pass of the drafter catches up."""


@dataclass(frozen=True)
class Settings:
    """How a request's tokens are chosen."""

    params: SamplingParams
    seed: int
    k: int
    """Most drafts in a cycle."""
    stop_ids: tuple[int, ...]
    """Tokens that end the output, ascending."""
    constraint: str | None
    """The request whose constraint the host follows; None: there is none."""

    @property
    def sampling(self) -> tuple[float, int, float, float, int]:
        """The request's values of `ops.sampling.Sampling`."""
        how = self.params
        return how.temperature, max(how.top_k, 0), how.top_p, how.min_p, self.seed


@dataclass(frozen=True)
class Begin:
    """A request gets a table row."""

    row: int
    settings: Settings
    tokens: tuple[int, ...]
    """All that are known: its prompt, and after a preemption its output so far."""
    prompt_length: int
    state: int | None = None
    """The slot of the recurrent layers' state behind its cached prefix; None: there is none."""


class PromptChunk(msgspec.Struct, frozen=True):
    """Consecutive known tokens of one request, whose keys are to be computed."""

    row: int
    start: int
    """Position of the first."""
    tokens: tuple[int, ...]
    next_token: int
    """The one after them; where none is known yet, the last of them again."""
    completes: bool
    """Whether they are the last ones known, so that the request's next token is chosen."""
    hosted: bool = False
    """Whether the host takes part in that choice."""
    missing: int = 0
    """Output tokens that must come before one that ends it."""
    scored: range = range(0)
    """Positions whose next token's log-probability is wanted."""
    top: int = 0
    """How many likely tokens are told for each of them."""
    state: int | None = None
    """The slot where the recurrent layers' state behind it is kept; None: it is not."""

    @property
    def rows(self) -> int:
        """Target rows."""
        return len(self.tokens)

    @property
    def stop(self) -> int:
        """Position after its last row."""
        return self.start + self.rows

    @property
    def following(self) -> tuple[int, ...]:
        """The token after each of its own."""
        return (*self.tokens[1:], self.next_token)


class Cycle(msgspec.Struct, frozen=True):
    """One draft and one verification for a request whose newest token alone lacks its keys."""

    row: int
    start: int
    """Position of the newest token; where steps are in flight, the furthest that it can be."""
    drafts: int
    """At most K."""
    hosted: bool = False
    """As in `PromptChunk`."""
    missing: int = 0
    """As in `PromptChunk`."""

    completes: ClassVar[bool] = True
    """As in `PromptChunk`: always."""


class BlockUpdate(NamedTuple):
    """A block that a request got, or gave back since none of its rows sees it any more."""

    group: int
    """The group of layers that see equally far back: `block_groups`."""
    row: int
    place: int
    """Among the request's blocks."""
    block: int | None
    """None: the request has no block there now."""


@dataclass(frozen=True)
class Step:
    """One call of a worker; its parts are carried out in this order."""

    number: int
    left: tuple[int, ...] = ()
    """Rows that are nobody's now."""
    caught_up: tuple[int, ...] = ()
    """Those of them whose drafter sees what it has missed first of all: the prefix cache knows
    their blocks already."""
    cleared: tuple[tuple[int, int], ...] = ()
    """(group, block) of those to fill with zeros."""
    begun: tuple[Begin, ...] = ()
    blocks: tuple[BlockUpdate, ...] = ()
    cycles: tuple[Cycle, ...] = ()
    repeats: int = 1
    """How often these run, one after the other; more than once only without drafts or the host."""
    chunks: tuple[PromptChunk, ...] = ()
    nodes: int = 0
    """Drafts of each of the cycles where they branch; 0: they are chains."""

    @property
    def work(self) -> tuple[Cycle | PromptChunk, ...]:
        """What there is to compute."""
        return *self.cycles, *self.chunks

    @property
    def rows(self) -> int:
        """Target rows of the chunks and of the cycles, as if no drafts branched."""
        cycles = sum(1 + cycle.drafts for cycle in self.cycles)
        return cycles * self.repeats + sum(chunk.rows for chunk in self.chunks)

    @property
    def hosted(self) -> bool:
        """Whether the host takes part in a choice of tokens."""
        return any(item.hosted for item in self.work)

    @property
    def description(self) -> str:
        """What there is to compute, for the log."""
        drafts = max((cycle.drafts for cycle in self.cycles), default=0)
        furthest = max((item.start for item in self.work), default=0)
        return (
            f"step {self.number} ({len(self.cycles)} cycles of up to {drafts} drafts, "
            f"{self.nodes} where they branch, {self.repeats} times; {len(self.chunks)} chunks of "
            f"prompts; {self.rows} rows up to position {furthest}; on the host: {self.hosted})"
        )


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position, before temperature and filters."""

    chosen: float
    rank: int
    """How many tokens are as likely, itself included."""
    top: tuple[tuple[int, float], ...]
    """(token id, log-probability), most likely first."""


class Result(msgspec.Struct, frozen=True):
    """What a step did for one request."""

    row: int
    tokens: tuple[int, ...] = ()
    """The accepted drafts, then the target's own; -1: its logits are NaN. Empty in the middle of
    a prompt."""
    accepted: int = 0
    drafted: int = 0
    """Drafts of a path: K where more are verified that branch."""
    pending: int = 0
    """Positions with the target's keys that the drafter has not seen."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of `tokens`, if they are wanted."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of the tokens after a chunk's scored positions."""


@dataclass(frozen=True)
class CycleTime:
    """How long a captured cycle took, each time that the step had it."""

    requests: int
    drafts: int
    seconds: float
    host: float = 0.0
    """Seconds of the host for the whole step, from the outcome before its plan until its launch; 0:
    not known."""
    catching_up: float = 0.0
    """Seconds before it in which the drafter saw what it had missed, and nothing else ran."""


@dataclass(frozen=True)
class Outcome:
    """A worker's answer to a step."""

    step: int | None = None
    """The step whose results these are: this one, or the one before; None: there are none yet."""
    results: tuple[Result, ...] = ()
    """The results of the requests that took part in it; fewer where it did not run."""
    time: CycleTime | None = None
    """The time of the step's cycle, where it was measured."""
    refused: tuple[int, ...] = ()
    """Rows whose chunks in this step did not run, for want of memory."""

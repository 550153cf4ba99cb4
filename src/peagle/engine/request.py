"""One generation's state, from its prompt to its last token."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import InitVar, dataclass

import msgspec

from peagle.config import SamplingParams
from peagle.engine.block_groups import NO_BLOCKS, HeldBlocks
from peagle.engine.block_pool import block_hash
from peagle.engine.constraint import Constraint
from peagle.engine.step import Begin, Settings, TokenLogprobs


@dataclass(eq=False)
class Request:
    """A prompt, how to sample from it, and how far it has come.

    Lengths, all in tokens: `computed` <= `total` - 1 once running, `drafter_computed` <=
    `computed`; the last token of a decoding request has no KV yet, since it is the next step's
    first input. The scheduler alone writes them.
    """

    id: str
    prompt: InitVar[Sequence[int]]
    params: SamplingParams
    seed: int
    k: int
    constraint: Constraint | None = None
    from_features: bool = True
    """Whether its drafts need the target's features of the last position."""
    may_go_undrafted: bool = False
    """Whether it may go without drafts all its life."""

    def __post_init__(self, prompt: Sequence[int]) -> None:
        params = self.params
        self.prompt_length = len(prompt)
        self.longest = len(prompt) + params.max_tokens
        """Tokens at which it ends, if the context holds them."""
        self.tokens = list(prompt)
        asked = bool(params.logit_bias) or params.logprobs is not None
        self._hosted = asked or self.constraint is not None
        """Whether the host takes part in the choice of all its tokens."""
        self.forget_cache()
        self.finish_reason: str | None = None
        self.failure: str | None = None
        """Why it ended with an error."""
        self._hashes: tuple[list[bytes], list[bytes]] = [], []
        """Content hashes of the full blocks so far known: without a drafter, and with one."""
        self.admissions = 0
        """How often it was admitted; results launched before the last time are void."""
        self.stop_ids: frozenset[int] = frozenset()
        """Token ids that end this request."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log-probabilities of the prompt's tokens from the second on, as far as they are known."""
        self.arrived = time.perf_counter()
        self.admitted: float | None = None
        """When it first ran."""
        self.cached = 0
        """Prompt tokens found in the prefix cache when it first ran."""
        self.reused = 0
        """Tokens found there when it was last admitted."""
        self.distrusts_cache = params.unrecorded_from is not None
        """Whether it has met NaN after cached keys, or audits them, and is computed without any."""
        self._told = False
        """Whether an output has said how it began."""

    @property
    def salt(self) -> bytes:
        """What keeps its blocks apart from those of requests with another `cache_salt`."""
        given = (self.params.cache_salt or "").encode(errors="surrogatepass")
        return hashlib.blake2b(given, digest_size=16).digest() if given else b""

    @property
    def total(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_length :]

    @property
    def output_length(self) -> int:
        """How many tokens were generated so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Positions whose features the drafter has not seen yet."""
        return self.computed - self.drafter_computed

    @property
    def unscored(self) -> range:
        """Positions of the prompt whose next token's log-probability is still to be found."""
        last = self.prompt_length - 1
        asked = self.params.prompt_logprobs is not None
        first = (self.params.unrecorded_from or 1) - 1
        return range(first + len(self.prompt_logprobs) if asked else last, last)

    @property
    def furthest(self) -> int:
        """Most positions that are computed once everything launched is done."""
        return self.computed + self.ahead

    @property
    def ready(self) -> bool:
        """Whether drafts can be made after its newest token."""
        return self.pending > 0 or not self.from_features

    def until_end(
        self, tokens: tuple[int, ...], max_length: int
    ) -> tuple[tuple[int, ...], str | None]:
        """New tokens up to and including the one that ends the request, and why it ends.

        Those of a prompt after which nothing is to be generated are none, and end it.
        """
        allowed = min(self.longest, max_length) - self.total
        for index, token in enumerate(tokens[:allowed]):
            if token < 0:
                return tokens[:index], "error"
            if token in self.stop_ids and self.output_length + index >= self.params.min_tokens:
                return tokens[: index + 1], "stop"
            if index + 1 < allowed and self._repeats(tokens[: index + 1]):
                return tokens[: index + 1], "repetition"
        return tokens[:allowed], "length" if tokens and len(tokens) >= allowed else None

    def _repeats(self, new: tuple[int, ...]) -> bool:
        """Whether its output repeats itself so that it ends, given its next tokens."""
        detection = self.params.repetition_detection
        if detection is None or self.output_length + len(new) < self.params.min_tokens:
            return False
        first = max(self.prompt_length, self.total - detection.span)
        return detection.found_in((*self.tokens[first:], *new))

    @property
    def speculates(self) -> bool:
        """Whether a drafter works for this request."""
        return self.k > 0

    @property
    def needs_host(self) -> bool:
        """Whether the host changes or reads the logits of its next tokens."""
        return self._hosted or self.missing > 0

    @property
    def missing(self) -> int:
        """Output tokens that must come before one that ends it."""
        least = self.params.min_tokens
        return max(least - self.output_length, 0) if least and self.stop_ids else 0

    def block_hashes(self, count: int, size: int) -> list[bytes]:
        """Hashes of its first `count` blocks of `size` tokens, as far as the tokens are known.

        A drafter's keys at position p depend on token p + 1, so where a drafter works the hash
        covers one token past the block, and its blocks are kept apart from those without.
        """
        return self._chain(count, size, int(self.speculates))

    def _chain(self, count: int, size: int, ahead: int) -> list[bytes]:
        """As `block_hashes`. ahead: 1 with a drafter, else 0."""
        hashes = self._hashes[ahead]
        count = min(count, (self.total - ahead) // size)
        for index in range(len(hashes), count):
            parent = hashes[index - 1] if index else bytes([ahead]) + self.salt
            tokens = self.tokens[index * size : (index + 1) * size + ahead]
            hashes.append(block_hash(parent, tokens))
        return hashes[:count]

    def prefix_hashes(self, size: int) -> list[bytes]:
        """Those of the blocks that need not be computed where their keys are known.

        At least one token is left to compute, and all of a prompt that is still to be scored, whose
        rows have to be run.
        """
        return self.block_hashes(self._cacheable(size), size)

    def followed_prefix_hashes(self, size: int) -> list[bytes]:
        """The hashes under which others know its blocks with a drafter's keys beside the target's.

        Only a request without a drafter looks them up: it needs the target's keys alone.
        """
        if self.speculates or not self.from_features:
            return []
        return self._chain(self._cacheable(size), size, 1)

    def _cacheable(self, size: int) -> int:
        """Blocks that need not be computed where their keys are known."""
        left = self.unscored
        tokens = left.start if left else self.total - 1
        return 0 if self.distrusts_cache else tokens // size

    @property
    def is_unrecorded(self) -> bool:
        """Whether it must leave no trace, as an audit."""
        return self.params.unrecorded_from is not None

    @property
    def settings(self) -> Settings:
        """How its tokens are chosen, as a worker knows it."""
        ends = tuple(sorted(self.stop_ids))
        bound = None if self.constraint is None else self.id
        return Settings(self.params, self.seed, self.k, ends, bound)

    def admit(self, row: int, blocks: HeldBlocks, computed: int) -> Begin:
        """Start to run in a row of the request table, after a prefix that is computed."""
        self.running, self.row, self.blocks = True, row, blocks
        self.computed = self.drafter_computed = self.reused = computed
        self.remembered = len(blocks)
        self.admissions += 1
        if self.admitted is None:
            self.admitted, self.cached = time.perf_counter(), computed
        known = tuple(self.tokens)
        return Begin(row, self.settings, known, self.prompt_length, blocks.state)

    def launch(self, rows: int, tokens: int) -> None:
        """Note a step that was launched and whose outcome is not known yet."""
        self.ahead += rows
        self.promised += tokens

    def land(self, rows: int, tokens: int) -> None:
        """Note that the outcome of such a step is known; `computed` and `tokens` follow."""
        self.ahead -= rows
        self.promised -= tokens

    def beginning(self) -> "Beginning | None":
        """What the first output with tokens, or an end, tells; None: one has told it."""
        if self._told:
            return None
        self._told = True
        queued = (self.admitted or self.arrived) - self.arrived
        return Beginning(queued, self.cached, tuple(self.prompt_logprobs), self.seed)

    def forget_cache(self) -> None:
        """Go back to having no KV, as after a preemption; the tokens stay."""
        self.running = False
        """Else it waits, or has ended with a `finish_reason`."""
        self.computed = 0
        """Positions whose target KV is in the cache."""
        self.drafter_computed = 0
        """Positions whose drafter KV is in the cache."""
        self.blocks = NO_BLOCKS
        self.remembered = 0
        """Blocks that the pool knows by their hash."""
        self.row = -1
        """The request's row in the request table while it runs."""
        self.on_device = False
        """Whether its newest tokens live on the device, so that a step needs none from here."""
        self.ahead = 0
        """Most positions that launched steps may add to `computed`."""
        self.promised = 0
        """Fewest output tokens that launched steps bring."""


class Beginning(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a request by the time of its first token."""

    queued: float
    """Seconds from its arrival until it first ran."""
    cached: int
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """Log-probabilities of the prompt's second token and those after it, if requested; fewer after
    an error."""
    seed: int = 0
    """By which its tokens were drawn."""


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step gave one request; all that whoever asked for it learns of it."""

    request_id: str
    new_tokens: tuple[int, ...]
    accepted: int
    """How many of `new_tokens` are accepted drafts; the last one is the target's own."""
    finish_reason: str | None
    """stop (a stop token or end of text), length, repetition, abort or error; None: running."""
    drafted: int = 0
    """Drafts of a path: K where more are verified that branch."""
    verified: int = 0
    """How many of them were accepted, past the request's end too."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of `new_tokens`, if requested."""
    beginning: Beginning | None = None
    """In the first output that has tokens or an end."""
    failure: str | None = None
    """Why it ended with an error."""
    cycle: bool = False
    """Whether the step was a cycle for it, rather than a part of its prompt."""

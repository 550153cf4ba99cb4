"""A request between its prompt and its completion."""

import logging
import time
from dataclasses import dataclass, replace

from peagle.completion import Chunk, Completion
from peagle.config import SamplingParams
from peagle.dialects.reader import Reader
from peagle.dialects.tools import ToolUse
from peagle.engine.request import Beginning, RequestOutput
from peagle.engine.step import TokenLogprobs
from peagle.engine_client.form import Form
from peagle.speculation import DraftTotals, Speculation

NO_BEGINNING = Beginning(0.0, 0, ())
log = logging.getLogger("peagle.requests")


@dataclass(frozen=True)
class ChatTurn:
    """That a prompt is a rendered conversation, whose answer is read by the target's dialect."""

    use: ToolUse | None = None
    """The tools that the answer may call."""


@dataclass(frozen=True)
class Prepared:
    """A request that is encoded but not yet queued."""

    tokens: list[int]
    params: SamplingParams
    form: Form | None
    chat: ChatTurn | None = None

    def choices(self, n: int) -> "list[Prepared]":
        """The same n times, each with a seed of its own, so that sampled ones differ."""
        seed = self.params.seed
        if seed is None:
            return [self] * n
        seeds = ({"seed": seed + index} for index in range(n))
        return [replace(self, params=self.params.model_copy(update=each)) for each in seeds]


class LiveRequest:
    """A request that runs: what outputs have brought, and what is read of it."""

    def __init__(
        self, prepared: Prepared, reader: Reader, most: int, followed: bool, replica: int
    ) -> None:
        params = prepared.params
        asked = params.num_speculative_tokens
        self.prepared, self.reader, self.followed = prepared, reader, followed
        self.replica = replica
        self.shows_end = params.include_stop_str_in_output and prepared.chat is None
        """Whether a token that ends the output is part of its text."""
        self.speculation = Speculation([0] * (most if asked is None else asked))
        self.arrived = time.perf_counter()
        self.beginning = NO_BEGINNING
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.times: list[float] = []
        """When each token came."""
        self.read_tokens = 0
        """Tokens that were read, to a stop string at most."""
        self.may_stop = bool(params.stop)
        """Whether its text may end it."""
        self.at_its_end = not followed and not self.may_stop
        """Whether all is read at once, when the last token has come."""
        self.told = 0
        """Tokens that chunks have brought."""
        self.drafted: list[bool] = []
        """Which tokens are accepted drafts."""
        self.refused = 0
        """Drafts that were not accepted and that no chunk has told of."""
        self._fault: str | None = None
        """Why its text cannot be read."""

    def add(self, output: RequestOutput, now: float, totals: DraftTotals) -> None:
        """Take in what a step has brought, and count its cycle among those of all requests."""
        new = output.new_tokens
        self.tokens += new
        self.times += [now - self.arrived] * len(new)
        self.drafted += [place < output.accepted for place in range(len(new))]
        self.logprobs += output.logprobs
        if output.cycle:
            did = output.drafted, output.verified, max(len(new), 1)
            self.speculation.record(*did)
            totals.record(*did)
            self.refused += output.drafted - output.verified
        if output.beginning is not None:
            self.beginning = output.beginning

    @property
    def is_due(self) -> bool:
        """Whether what was read makes a chunk before the end."""
        unread = self.read_tokens - self.told
        return self.followed and (not self.told or unread >= self.prepared.params.stream_interval)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs | None, ...]:
        """As in `Completion`."""
        if self.prepared.params.prompt_logprobs is None:
            return ()
        return None, *self.beginning.prompt_logprobs

    def chunk(self, request_id: str, completion: Completion | None) -> Chunk:
        """What was read since the last one."""
        known, read, refused = self.told, self.read_tokens, self.refused
        self.told, self.refused = read, 0
        return Chunk(
            request_id,
            self.reader.fresh(),
            tuple(self.tokens[known:read]),
            tuple(self.reader.sections[known:]),
            tuple(self.drafted[known:read]),
            tuple(self.logprobs[known:read]),
            () if known else self.prompt_logprobs,
            completion,
            refused,
            self.replica,
        )

    def read(self, finish_reason: str | None) -> str | None:
        """Read what has come. Returns why the request ended; None: it goes on.

        finish_reason: why the engine ended it. A stop string that the text now holds ends it, too,
        and so does a fault of what reads it: an answer must not disturb others.
        """
        try:
            return self._read(finish_reason)
        except Exception:
            log.exception("an answer cannot be read, and ends")
            self._fault = "its text cannot be read; the log says why"
            return "error"

    def _read(self, finish_reason: str | None) -> str | None:
        tokens, reason, reader = self.tokens[self.read_tokens :], finish_reason, self.reader
        if reason is None and (self.at_its_end or not tokens):
            return None
        hidden = int(reason == "stop" and not self.shows_end)
        stopped = reader.extend(tokens[: len(tokens) - hidden] if hidden else tokens)
        self.read_tokens += len(tokens) if stopped is None else stopped
        if stopped is not None:
            return "stop"
        if reason is not None:
            reader.skip(hidden)
            reader.finish(reason == "stop")
            if reader.stopped and reason == "length":
                return "stop"
            if reason == "stop" and reader.cut:
                self._fault = "the model ended its answer within the arguments of a call"
                return "error"
        return reason

    def completion(self, output: RequestOutput, reason: str) -> Completion:
        """The finished request, less the tokens after a stop string.

        output: the last one.
        """
        kept = self.read_tokens
        return Completion(
            request_id=output.request_id,
            prompt_token_ids=tuple(self.prepared.tokens),
            token_ids=tuple(self.tokens[:kept]),
            message=self.reader.message,
            finish_reason=reason,
            speculation=self.speculation,
            logprobs=tuple(self.logprobs[:kept]),
            token_times=tuple(self.times[:kept]),
            queued=self.beginning.queued,
            cached_tokens=self.beginning.cached,
            seed=self.beginning.seed,
            sections=tuple(self.reader.sections),
            events=self.reader.events,
            stop_string=self.reader.stop_string,
            failure=(self._fault or output.failure) if reason == "error" else None,
            prompt_logprobs=self.prompt_logprobs,
            replica=self.replica,
        )

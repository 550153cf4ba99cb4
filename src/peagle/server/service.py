"""The engine as the routes see it: bounded, counted, and shut down in order."""

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request

from peagle.async_llm import AsyncLLM, Batch
from peagle.completion import Chunk
from peagle.config import SamplingParams
from peagle.encoder import Prompt
from peagle.live_request import ChatTurn, Prepared
from peagle.llm import LLM
from peagle.preparation import SIZE, kind_of
from peagle.server.auditor import Auditor
from peagle.server.errors import APIError, closing, unresponsive
from peagle.server.metrics import Metrics, Watch
from peagle.server.middleware import KEY, ORIGIN
from peagle.server.settings import ServerSettings

if TYPE_CHECKING:
    from peagle.server.spans import RequestSpans

T = TypeVar("T")
DRAIN_STEP = 0.05
"""Seconds between two checks of what still runs."""
GRACE = 5.0
"""Seconds that the engine's thread has to end; as many again once its process is killed."""


@dataclass(frozen=True)
class Job:
    """The sequences of one HTTP request: every prompt `n` times, in order."""

    prepared: Sequence[Prepared]
    batches: AsyncIterator[Batch]
    """The chunks they write, as they come, each with its sequence's index."""
    n: int

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once for its `n` sequences."""
        return sum(len(one.tokens) for one in self.prepared[:: self.n])


class Service:
    """Admits requests up to a bound, runs them and counts what they did."""

    def __init__(self, llm: AsyncLLM, settings: ServerSettings) -> None:
        self._async = llm
        self.llm: LLM = llm.llm
        self.settings = settings
        name = settings.model_names[0]
        self.metrics = Metrics(name, self.llm.engine, self.llm.draft_totals)
        suggested = self.llm.sampling_defaults if settings.generation_config == "auto" else {}
        self.sampling_defaults = suggested | {"stream_interval": settings.stream_interval}
        self.capacity = math.inf
        if settings.max_queue is not None:
            self.capacity = self.llm.engine.max_num_seqs + settings.max_queue
        self.siblings = self.metrics.siblings
        self.draining = False
        self.started = int(time.time())
        self.distrusted = False
        """Whether an audit has found what ends the server."""
        self.spans: RequestSpans | None = None
        if settings.otlp_traces_endpoint is not None:
            from peagle.server import spans  # whose libraries are an extra

            self.spans = spans.RequestSpans(settings.otlp_traces_endpoint, name)
        self.auditor: Auditor | None = None
        if settings.audit:
            self.auditor = Auditor(llm, settings, self.metrics, self._load, self._distrust)

    @staticmethod
    def of(request: Request, model: str | None = None) -> "Service":
        """That of the application to which a request came.

        Raises `APIError` when the request names another model.
        """
        service: Service = request.app.state.service
        service.check_model(model)
        return service

    @property
    def ready(self) -> bool:
        """Whether new requests are accepted."""
        return self._async.responds and not self.draining

    @property
    def admitted(self) -> int:
        """Sequences that wait or run, by way of any process."""
        return sum(self.siblings.admitted)

    @property
    def failed(self) -> bool:
        """Whether the engine has failed."""
        return self._async.failed

    @property
    def exit_code(self) -> int:
        """That of the process: 1 where it is to be started again."""
        return int(self.failed or self.distrusted)

    @contextlib.contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Reserve room for sequences. Raises `APIError`: 400 for more than may ever run, 503 during
        shutdown, 429 when full."""
        if sequences > (most := self.settings.limits.choices):
            raise APIError(400, f"more than {most} choices", "n")
        if not self.ready:
            why = "draining" if self.draining else "engine"
            self.metrics.count("peagle:requests_rejected", 1, why)
            raise closing(self.failed) if self.draining or self.failed else unresponsive()
        if sequences > self.capacity:
            raise APIError(400, f"{sequences} sequences, but the server holds {self.capacity}", "n")
        if self.admitted + sequences > self.capacity:
            self.metrics.count("peagle:requests_rejected", 1, "queue")
            raise APIError(429, "the queue is full; try again", headers={"Retry-After": "1"})
        self.siblings.admitted[self.siblings.index] += sequences
        try:
            yield
        finally:
            self.siblings.admitted[self.siblings.index] -= sequences

    def check_model(self, name: str | None) -> None:
        """Raise `APIError` when a request names another model."""
        if name is not None and name not in self.settings.model_names:
            known = self.settings.model_names[0]
            raise APIError(404, f"the model {name!r} does not exist here, but {known!r}", "model")

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, possibly none for an empty one."""
        return await self.aside(self.llm.tokenize, text, add_special_tokens)

    async def aside(self, work: Callable[..., T], *given: Any, size: int | None = None) -> T:
        """What some work returns or raises that would keep the event loop.

        size: in bytes; by default that of the request's body.
        """
        kind = kind_of(SIZE.get() if size is None else size)
        return await self._async.preparation.run(kind, work, *given)

    async def begin(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        n: int,
        running: contextlib.AsyncExitStack,
        chat: ChatTurn | None = None,
    ) -> Job:
        """Encode every prompt and run it n times; closing `running` cancels what still runs."""
        if params.priority and self.settings.scheduling_policy != "priority":
            told = "requests have no priority here; start with --scheduling-policy priority"
            raise APIError(400, told, "priority")
        params = self._apart(params)
        each = [await self._async.prepare(prompt, params, chat) for prompt in prompts]
        prepared = [choice for one in each for choice in one.choices(n)]
        self._check_logprobs(prepared)
        # n sequences in a row share a prompt, which counts once
        watches = [self.metrics.watch(one, None if i % n else n) for i, one in enumerate(prepared)]
        batches = await running.enter_async_context(self._async.run(prepared))
        for watch in watches:
            running.callback(watch.close)

        origin = ORIGIN.get({})

        def offer(index: int, chunk: Chunk) -> None:
            if (done := chunk.completion) is None:
                return
            if self.spans is not None:
                self.spans.tell(prepared[index], done, n, origin)
            if self.auditor is not None:
                self.auditor.offer(prepared[index], done)

        return Job(prepared, _counted(batches, watches, offer), n)

    def _apart(self, params: SamplingParams) -> SamplingParams:
        """Parameters by which no other key's requests share a cached prefix: `cached_tokens` would
        tell of their prompts."""
        if (key := KEY.get()) is None:
            return params
        return params.model_copy(update={"cache_salt": f"{key} {params.cache_salt or ''}"})

    def _check_logprobs(self, prepared: Sequence[Prepared]) -> None:
        limits = self.settings.limits
        scored = [(one.params.max_tokens, one.params.logprobs) for one in prepared]
        if (count := _scores(scored)) > limits.logprobs:
            told = f"{count} log-probabilities, but an answer holds {limits.logprobs}"
            raise APIError(400, told, "logprobs")
        asked = [(len(one.tokens), one.params.prompt_logprobs) for one in prepared]
        if (count := _scores(asked)) > (most := limits.prompt_logprobs):
            told = f"{count} log-probabilities of prompts, but an answer holds {most}"
            raise APIError(400, f"{told}; ask for fewer, or send fewer prompts", "prompt")

    def _load(self) -> float:
        """The share of the engine's seats that is taken; no seat is free while it drains."""
        return math.inf if self.draining else self.admitted / self.llm.engine.max_num_seqs

    def _distrust(self) -> None:
        self.distrusted = self.settings.audit_action == "drain"

    async def drain(self) -> None:
        """Accept no more requests, and wait for those that run as long as the settings allow."""
        self.draining = True
        deadline, own = time.monotonic() + self.settings.drain_seconds, self.siblings
        while own.admitted[own.index] and time.monotonic() < deadline and self._async.responds:
            await asyncio.sleep(DRAIN_STEP)

    def abandon(self) -> None:
        """End all requests with an error, and an engine in another process, at once."""
        self.draining = True
        self._async.abandon()
        self.llm.engine.kill()

    def close(self) -> None:
        """Stop the engine, whatever it does; streams still open end with an error."""
        self.draining = True
        self._async.close(GRACE)


def _scores(asked: Iterable[tuple[int, int | None]]) -> int:
    """Log-probabilities of so many tokens, each with so many likely ones, where any are asked."""
    return sum(tokens * (1 + top) for tokens, top in asked if top is not None)


async def _counted(
    batches: AsyncIterator[Batch], watches: Sequence[Watch], offer: Callable[[int, Chunk], object]
) -> AsyncIterator[Batch]:
    async for batch in batches:
        now = time.perf_counter()
        ends = any(chunk.completion is not None for _, chunk in batch)
        if not ends:  # count after handing over: the client waits for tokens, not for counts
            yield batch
        for index, chunk in batch:
            watches[index].add(chunk, now)
            offer(index, chunk)
        if ends:
            yield batch

"""From running sequences to one HTTP answer: a JSON object, or a stream of events."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from peagle.engine.request import Speculation
from peagle.llm import Chunk, Completion
from peagle.server.errors import CLIENT_GONE, APIError, as_api_error
from peagle.server.middleware import GIVEN_ID
from peagle.server.protocol import ChatBody, GenerationBody, StreamOptions
from peagle.server.service import Job, Service

DONE = b"data: [DONE]\n\n"
WAITING = b": writing\n\n"
"""A comment, which clients ignore."""
SILENCE = 15.0
"""Seconds without an event after which proxies may close a stream."""
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
UNREAD = 60.0
"""Seconds for which a client may leave a stream unread, at most twice that: its request keeps
others from being admitted."""
Json = dict[str, Any]
T = TypeVar("T")
log = logging.getLogger("peagle.server")


class Form(Protocol):
    """The form of one route's answers."""

    prefix: str
    """Prefix of ids."""
    kind: str
    """The `object` field of an answer."""
    chunk_kind: str
    """The `object` field of a stream's chunk."""

    def choice(self, index: int, completion: Completion) -> Json:
        """A finished choice."""
        ...

    def whole(self, done: Sequence[Completion]) -> Json:
        """What an answer has besides its choices and its usage."""
        ...

    def deltas(self, index: int, chunk: Chunk) -> Sequence[Json]:
        """What a chunk adds to its choice, for a stream; perhaps nothing yet."""
        ...


async def answer(
    service: Service,
    form: Form,
    job: Job,
    body: GenerationBody,
    request: Request,
    running: contextlib.AsyncExitStack,
) -> Response:
    """Answer with what the sequences write. Closing `running` or a client that leaves ends them."""
    if GIVEN_ID.fullmatch(body.request_id or ""):
        request.state.request_id = body.request_id
    head = {
        "id": f"{form.prefix}-{request.state.request_id}",
        "object": form.chunk_kind if body.stream else form.kind,
        "created": int(time.time()),
        "model": service.settings.model_names[0],
    }
    if body.stream:
        return EventStream(_worded(form, job, head, body), running.pop_all())
    done = await unless_gone(request.receive, _collect(job))
    if done is None:
        return Response(status_code=CLIENT_GONE)
    choices = [
        _explained(form.choice(index, completion), completion, head)
        for index, completion in enumerate(done)
    ]
    if all(completion.failure for completion in done):
        raise APIError(500, done[0].failure or "")
    words = {**head, "choices": choices, "usage": usage(job, done), **form.whole(done)}
    if body.return_token_ids:
        for choice, completion in zip(choices, done, strict=True):
            _add_ids(body, words, choice, completion.token_ids, completion.prompt_token_ids)
    return JSONResponse(words)


def _add_ids(
    body: GenerationBody,
    words: Json,
    choice: Json,
    tokens: Sequence[int],
    prompt: Sequence[int] | None,
) -> None:
    """Add token ids as vLLM does: those of a conversation's prompt stand beside its choices."""
    choice["token_ids"] = tokens
    if prompt is not None:
        (words if isinstance(body, ChatBody) else choice)["prompt_token_ids"] = prompt


def usage(job: Job, done: Sequence[Completion]) -> Json:
    """Token counts of a request, and what speculation did for it."""
    cached = sum(completion.cached_tokens for completion in done[:: job.n])
    written = sum(len(completion.token_ids) for completion in done)
    did = Speculation.pooled([completion.speculation for completion in done])
    return {
        **_counts(job.prompt_tokens, written),
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": did.accepted,
            "rejected_prediction_tokens": did.drafted - did.accepted,
            "reasoning_tokens": sum(one.sections.count("reasoning") for one in done),
        },
        "speculation": {
            "cycles": did.cycles,
            "drafted": did.drafted,
            "accepted": did.accepted,
            "accepted_per_position": did.accepted_per_position,
            "acceptance_length": did.acceptance_length,
        },
    }


def _counts(prompt: int, written: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
    }


def event(data: Json) -> bytes:
    """One server-sent event, in ASCII: some clients also split lines at other characters."""
    return b"data: " + to_json(data, ensure_ascii=True) + b"\n\n"


async def unless_gone(
    receive: Receive, work: Coroutine[Any, Any, T], unread: Callable[[], bool] = lambda: False
) -> T | None:
    """The result of `work`, or None when the client left first, which cancels the work.

    unread: whether the client has stopped reading, asked every `UNREAD` seconds; it then counts as
    gone.
    """
    leaving = asyncio.ensure_future(_gone(receive, unread))
    try:
        async with asyncio.timeout(None) as patience:
            leaving.add_done_callback(partial(_end, patience))
            return await work
    except TimeoutError:
        if patience.expired():
            return None
        raise
    finally:
        leaving.cancel()


def _end(patience: asyncio.Timeout, _: object) -> None:
    with contextlib.suppress(RuntimeError):  # the work has already ended
        patience.reschedule(0)


class EventStream(Response):
    """Sends events as they come; cancels their sequences when the client leaves."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        running: contextlib.AbstractAsyncContextManager[Any],
    ) -> None:
        super().__init__()
        self._events, self._running = events, running
        self._sending, self._sent, self._seen = False, 0, -1

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        """Every stream has the same headers."""
        self.raw_headers = list(EVENT_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        async with self._running:
            await unless_gone(receive, self._send(send), self._unread)

    async def _send(self, send: Send) -> None:
        """The head goes out at once, while the engine works on the first token."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            self._sending = True
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._sending, self._sent = False, self._sent + 1
        await send({"type": "http.response.body", "body": b""})

    def _unread(self) -> bool:
        """Whether the same event is still being sent as at the last call."""
        before, self._seen = self._seen, self._sent
        return self._sending and self._sent == before


async def _gone(receive: Receive, unread: Callable[[], bool]) -> None:
    while True:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(UNREAD):
                while (await receive())["type"] != "http.disconnect":
                    pass
                return
        if unread():
            log.warning(f"a stream was not read for {UNREAD:.0f} s and is ended")
            return


def _explained(choice: Json, completion: Completion, head: Json) -> Json:
    """A choice; if it ended with an error, the log gets the reason, and the client if others did
    not: an answer of which nothing came to its end is an error as a whole."""
    if completion.failure is None:
        return choice
    which = f"choice {choice['index']} of {head['id']}"
    log.warning(f"{which} ended with an error: {completion.failure}")
    return {**choice, "error": {"message": completion.failure}}


async def _collect(job: Job) -> list[Completion]:
    done: dict[int, Completion] = {}
    async for index, chunk in job.chunks:
        if chunk.completion is not None:
            done[index] = chunk.completion
    return [done[index] for index in range(len(job.prepared))]


async def _worded(form: Form, job: Job, head: Json, body: GenerationBody) -> AsyncIterator[bytes]:
    """Chunks as events, then the usage if requested; an error becomes the last event."""
    wanted = body.stream_options or StreamOptions()
    done: dict[int, Completion] = {}
    unsaid: list[list[int]] = [[] for _ in job.prepared]
    """Tokens of which nothing could be shown yet."""
    begun: set[int] = set()
    prompt, written, said = job.prompt_tokens, 0, time.monotonic()
    try:
        async for index, chunk in job.chunks:
            choices = form.deltas(index, chunk)
            if chunk.completion is not None:
                done[index] = chunk.completion
                *before, last = choices
                choices = [*before, _explained(last, chunk.completion, head)]
                if len(job.prepared) == 1 and chunk.completion.failure is not None:
                    raise APIError(500, chunk.completion.failure)
            written += len(chunk.token_ids)
            unsaid[index] += chunk.token_ids
            for choice in choices:
                words: Json = {**head, "choices": [choice]}
                if body.return_token_ids:
                    asked = None if index in begun else job.prepared[index].tokens
                    _add_ids(body, words, choice, unsaid[index], asked)
                    unsaid[index] = []
                    begun.add(index)
                if wanted.continuous_usage_stats:
                    words["usage"] = _counts(prompt, written)
                yield event(words)
                said = time.monotonic()
            if time.monotonic() - said > SILENCE:
                yield WAITING
                said = time.monotonic()
    except Exception as error:
        refusal = as_api_error(error)
        if refusal.status == 500:
            log.exception("a stream failed")
        yield event(refusal.body.model_dump())
        return
    if wanted.include_usage:
        finished = [done[index] for index in range(len(job.prepared))]
        yield event({**head, "choices": [], "usage": usage(job, finished)})
    yield DONE

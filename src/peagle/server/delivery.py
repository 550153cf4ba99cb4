"""From running sequences to one HTTP answer: a JSON object, or a stream of events."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from peagle.completion import Chunk, Completion
from peagle.engine_client.replicas import LOST
from peagle.grammar import FORM
from peagle.preparation import LARGE
from peagle.server.errors import APIError, as_api_error
from peagle.server.service import Job, Service

SILENCE = 15.0
"""Seconds without an event after which proxies may close a stream."""
WAITING = b": writing\n\n"
"""What is sent meanwhile: a comment, which clients ignore."""
EVENT_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
Json = dict[str, Any]
T = TypeVar("T")
log = logging.getLogger("peagle.server")


class Answer(Protocol):
    """One request's answer, as its route tells it."""

    id: str
    waiting: bytes
    """What is sent where nothing was said for long."""

    def whole(self, done: Sequence[Completion]) -> Json:
        """The answer as one object."""

    def begin(self) -> Iterable[bytes]:
        """A stream's events before any token."""

    def add(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """The events of a chunk of sequence `index`; perhaps nothing yet."""

    def end(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """A stream's last events."""

    def fail(self, refusal: APIError) -> bytes:
        """A stream's last event, where it cannot go on."""


async def deliver(
    answer: Answer, job: Job, streamed: bool, request: Request, running: contextlib.AsyncExitStack
) -> Response:
    """Answer with what the sequences write. Closing `running` ends them, and so does a client that
    leaves a stream."""
    if streamed:
        # the stream ends the sequences itself: it outlives this call
        return EventStream(_events(answer, job), running.pop_all())
    done = await _collect(job)
    _log_failures(answer, enumerate(done))
    if all(completion.failure for completion in done):
        raise _failed(done[0].failure or "")
    size = sum(map(_size, done))
    if size <= LARGE:
        return JSONResponse(answer.whole(done))
    return await Service.of(request).aside(lambda: JSONResponse(answer.whole(done)), size=size)


def _size(done: Completion) -> int:
    """About how many bytes a choice takes."""
    scores = sum(1 + len(one.top) for one in (*done.logprobs, *done.prompt_logprobs) if one)
    return 4 * len(done.token_ids) + 64 * scores


def event(data: Json, name: str | None = None) -> bytes:
    """One server-sent event, in ASCII: some clients also split lines at other characters."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(data, ensure_ascii=True) + b"\n\n"


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None when the client left first, which cancels the work."""
    leaving = asyncio.ensure_future(_gone(receive))
    try:
        # a timeout cancels the work and knows that it did, whoever else may have cancelled it
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

    def __init__(self, events: AsyncIterator[bytes], running: contextlib.AsyncExitStack) -> None:
        super().__init__()
        self.raw_headers = list(EVENT_HEADERS)
        self._events, self._running = events, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer over ASGI."""
        async with self._running:
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        """The head goes out at once, while the engine works on the first token."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _failed(why: str) -> APIError:
    """The refusal of an answer that ended with an error: another attempt may mend all but a form
    that turned out too complex, or that other fields leave no token for."""
    if why == LOST:
        return APIError(503, why, headers={"Retry-After": "1"})
    return APIError(400 if why.startswith(FORM) else 500, why)


def _log_failures(answer: Answer, done: Iterable[tuple[int, Completion]]) -> None:
    """Log why choices ended with an error. An answer of which nothing came to its end is an error
    as a whole; else its route tells which choice failed."""
    for index, completion in done:
        if completion.failure is not None:
            log.warning(f"choice {index} of {answer.id} ended with an error: {completion.failure}")


async def _collect(job: Job) -> list[Completion]:
    done: dict[int, Completion] = {}
    async for batch in job.batches:
        done |= {index: chunk.completion for index, chunk in batch if chunk.completion}
    return [done[index] for index in range(len(job.prepared))]


async def _events(answer: Answer, job: Job) -> AsyncIterator[bytes]:
    """A stream's events; an error becomes the last."""
    done: dict[int, Completion] = {}
    said = time.monotonic()
    try:
        for data in answer.begin():
            yield data
        async for batch in job.batches:
            ended = {index: chunk.completion for index, chunk in batch if chunk.completion}
            done |= ended
            _log_failures(answer, ended.items())
            lost = done[0].failure if len(job.prepared) == 1 and done else None
            # an error takes the place of a lost answer's end
            told = batch if lost is None else batch[:-1]
            data = b"".join(event for index, chunk in told for event in answer.add(index, chunk))
            if data or time.monotonic() - said > SILENCE:
                yield data or answer.waiting
                said = time.monotonic()
            if lost is not None:
                raise _failed(lost)
        for data in answer.end([done[index] for index in range(len(job.prepared))]):
            yield data
    except Exception as error:
        refusal = as_api_error(error)
        if refusal.status == 500:
            log.exception("a stream failed")
        yield answer.fail(refusal)

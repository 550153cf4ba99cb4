"""From running sequences to one HTTP answer: a JSON object, or a stream of events."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from pydantic_core import to_json
from starlette.types import Receive, Scope, Send

from peagle.completion import Chunk, Completion
from peagle.grammar import FORM
from peagle.server.errors import CLIENT_GONE, APIError, as_api_error
from peagle.server.service import Job

SILENCE = 15.0
"""Seconds without an event after which proxies may close a stream."""
WAITING = b": writing\n\n"
"""A comment, which clients ignore."""
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


class Answer(Protocol):
    """One request's answer, as its route tells it."""

    id: str
    waiting: bytes
    """Sent where nothing was said for long."""

    def whole(self, done: Sequence[Completion]) -> Json:
        """The answer as one object."""
        ...

    def begin(self) -> Iterable[bytes]:
        """A stream's events before any token."""
        ...

    def add(self, index: int, chunk: Chunk) -> Iterable[bytes]:
        """The events of a chunk of sequence `index`; perhaps nothing yet."""
        ...

    def end(self, done: Sequence[Completion]) -> Iterable[bytes]:
        """A stream's last events."""
        ...

    def fail(self, refusal: APIError) -> bytes:
        """A stream's last event, where it cannot go on."""
        ...


async def deliver(
    answer: Answer, job: Job, streamed: bool, request: Request, running: contextlib.AsyncExitStack
) -> Response:
    """Answer with what the sequences write. Closing `running` or a client that leaves ends them."""
    if streamed:
        return EventStream(_events(answer, job), running.pop_all())
    done = await unless_gone(request.receive, _collect(job))
    if done is None:
        return Response(status_code=CLIENT_GONE)
    for index, completion in enumerate(done):
        _log_failure(answer, index, completion)
    if all(completion.failure for completion in done):
        raise _failed(done[0].failure or "")
    return JSONResponse(answer.whole(done))


def event(data: Json, name: str | None = None) -> bytes:
    """One server-sent event, in ASCII: some clients also split lines at other characters."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(data, ensure_ascii=True) + b"\n\n"


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


def _failed(why: str) -> APIError:
    """The refusal of an answer that ended with an error: another attempt may mend all but a form
    that turned out too complex, or that other fields leave no token for."""
    return APIError(400 if why.startswith(FORM) else 500, why)


def _log_failure(answer: Answer, index: int, completion: Completion) -> None:
    """Log why a choice ended with an error. An answer of which nothing came to its end is an error
    as a whole; else its route tells which choice failed."""
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
            for index, completion in ended.items():
                _log_failure(answer, index, completion)
            lost = done[0].failure if len(job.prepared) == 1 and done else None
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

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from starlette.types import Message

from peagle.server.delivery import EventStream, event


def test_the_head_goes_out_while_the_first_event_is_waited_for() -> None:
    async def ask() -> list[Message]:
        working, sent = asyncio.Event(), []

        async def events() -> AsyncIterator[bytes]:
            await working.wait()
            yield b"data: 1\n\n"

        async def send(message: Message) -> None:
            sent.append(message)
            working.set()

        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        stream = EventStream(events(), contextlib.AsyncExitStack())
        async with asyncio.timeout(120):
            await stream({"type": "http"}, receive, send)
        return sent

    head, event, end = asyncio.run(ask())
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert (event["body"], end["body"]) == (b"data: 1\n\n", b"")


def test_an_event_is_one_line_for_clients_that_end_lines_at_any_separator() -> None:
    sent = event({"text": "a\u2028\u0085\n\x0cé"}).decode()
    assert len(sent.splitlines()) == 2  # its own and the empty one after it
    assert json.loads(sent.removeprefix("data: ")) == {"text": "a\u2028\u0085\n\x0cé"}

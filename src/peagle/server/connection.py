"""uvicorn's connections: bounded besides a body, and deaf to offers of HTTP/2."""

import asyncio
import logging
import re
import resource
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from peagle.server.errors import APIError
from peagle.server.middleware import HEAD_BYTES

OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""HTTP/2 offered with a request, as Java's clients do: to the parser the head is then all of it."""

HEAD_SECONDS = 60.0
"""Seconds in which the head of a request has to come, as in nginx."""
BODY_SECONDS = 120.0
"""Seconds for its body."""
UNREAD_SECONDS = 60.0
"""Seconds in which a client has to read some of its answer."""
PIPELINED = 64
"""Requests of one read."""
MOST_CONNECTIONS = 4096
SPARE_FILES = 100
"""Open files besides connections."""
TOLD_EVERY = 60.0
log = logging.getLogger("peagle.server")
_told = [-TOLD_EVERY]
"""When the limit of connections was logged last."""


def most_connections() -> int:
    """Connections that may be open: not more than the limit of open files leaves."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(MOST_CONNECTIONS, max(files - SPARE_FILES, files // 4))


def _tell_of_limit() -> None:
    if time.monotonic() - _told[0] >= TOLD_EVERY:
        _told[0] = time.monotonic()
        log.warning(f"{most_connections()} connections are open; further ones are closed")


class Connection(HttpToolsProtocol):
    """Closes when a head or a chunked body's trailer does not end: uvicorn keeps all of it.

    `SizeLimits` refuses a long head that does end. An offer of HTTP/2 is left out of a head with
    which a read begins; after any other the connection closes, since its parser has stopped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between, self._got_on, self._waiting = True, False, 0
        self._begun = 0
        """Requests that began in one read."""
        self._reading: asyncio.TimerHandle | None = None
        """Ends a connection whose head or body does not come in time."""
        self._writing: asyncio.TimerHandle | None = None
        """Ends one that reads nothing of its answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a head, unless there are too many connections."""
        super().connection_made(transport)
        if len(self.server_state.connections) > most_connections():
            _tell_of_limit()
            transport.abort()
        else:
            self._expect(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        self._expect(None)
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The other end reads more slowly than is written."""
        super().pause_writing()
        self._watch_writing(-1)

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _watch_writing(self, before: int) -> None:
        left = self.transport.get_write_buffer_size()
        if left == before:
            log.warning(f"an answer was not read for {UNREAD_SECONDS:.0f} s and is ended")
            self.transport.abort()
        else:
            self._writing = self.loop.call_later(UNREAD_SECONDS, self._watch_writing, left)

    def _expect(self, seconds: float | None) -> None:
        """Close unless this is called again within a time; None: nothing is waited for."""
        if self._reading is not None:
            self._reading.cancel()
        self._reading = None if seconds is None else self.loop.call_later(seconds, self._miss)

    def _miss(self) -> None:
        if self.transport.is_closing():
            return
        if self._waiting or not self._between:
            self.send_400_response("the request took too long to come")
        else:
            self.transport.close()

    def on_message_begin(self) -> None:
        """A head begins."""
        self._begun += 1
        if self._begun > PIPELINED:
            raise ValueError("too many requests at once")  # to the parser, which ends with it
        self._between = False
        if self._reading is None:
            self._expect(HEAD_SECONDS)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._got_on = True
        self._expect(BODY_SECONDS)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body and its trailer are complete."""
        self._between = self._got_on = True
        self._expect(None)
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read on; reads that complete nothing are part of one head or trailer."""
        self._got_on, self._begun = False, 0
        super().data_received(_without_offer(data) if self._between else data)
        self._waiting = 0 if self._got_on else self._waiting + len(data)
        if self._waiting > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"a head or trailer is longer than {HEAD_BYTES} bytes")

    def _unsupported_upgrade_warning(self) -> None:
        """An offer that nobody takes: no later request can be read."""
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request and close, in the form of all other errors."""
        refusal = APIError(400, msg, headers={"Connection": "close"}).response_on()
        headers = [*self.server_state.default_headers, *refusal.raw_headers]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[400] + lines + b"\r\n" + bytes(refusal.body))
        self.transport.close()


def _without_offer(data: bytes) -> bytes:
    head, end, body = data.partition(b"\r\n\r\n")
    return OFFER.sub(b"", head + end[:2]) + end[2:] + body

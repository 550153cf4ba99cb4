"""uvicorn's connections: bounded besides a body, and deaf to offers of HTTP/2."""

import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from peagle.server.errors import APIError
from peagle.server.middleware import HEAD_BYTES

OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""HTTP/2 offered with a request, as Java's clients do: to the parser the head is then all of it."""


class Connection(HttpToolsProtocol):
    """Closes when a head or a chunked body's trailer does not end: uvicorn keeps all of it.

    `HeadLimit` refuses a long head that does end. An offer of HTTP/2 is left out of a head with
    which a read begins; after any other the connection closes, since its parser has stopped.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._between, self._got_on, self._waiting = True, False, 0

    def on_message_begin(self) -> None:
        """A head begins."""
        self._between = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The head is complete."""
        self._got_on = True
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        self._got_on = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The body and its trailer are complete."""
        self._between = self._got_on = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read on; reads that complete nothing are part of one head or trailer."""
        self._got_on = False
        super().data_received(_without_offer(data) if self._between else data)
        self._waiting = 0 if self._got_on else self._waiting + len(data)
        if self._waiting > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"a head or trailer is longer than {HEAD_BYTES} bytes")

    def _unsupported_upgrade_warning(self) -> None:
        """An offer that nobody takes: no later request can be read."""
        self.cycle.keep_alive = False

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request and close, in the form of all other errors."""
        refusal = APIError(400, msg, headers={"Connection": "close"}).response
        headers = [*self.server_state.default_headers, *refusal.raw_headers]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[400] + lines + b"\r\n" + bytes(refusal.body))
        self.transport.close()


def _without_offer(data: bytes) -> bytes:
    head, end, body = data.partition(b"\r\n\r\n")
    return OFFER.sub(b"", head + end[:2]) + end[2:] + body

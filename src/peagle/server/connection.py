"""uvicorn's connections, with a bound on what grows in memory besides a body."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from peagle.server.errors import APIError
from peagle.server.middleware import HEAD_BYTES


class Connection(HttpToolsProtocol):
    """Closes when a head or a chunked body's trailer does not end: uvicorn keeps all of it.

    `HeadLimit` refuses a long head that does end.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._got_on, self._waiting = False, 0

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
        self._got_on = True
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Read on; reads that complete nothing are part of one head or trailer."""
        self._got_on = False
        super().data_received(data)
        self._waiting = 0 if self._got_on else self._waiting + len(data)
        if self._waiting > HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"a head or trailer is longer than {HEAD_BYTES} bytes")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request and close, in the form of all other errors."""
        refusal = APIError(400, msg, headers={"Connection": "close"}).response
        headers = [*self.server_state.default_headers, *refusal.raw_headers]
        lines = b"".join(b"%s: %s\r\n" % header for header in headers)
        self.transport.write(STATUS_LINE[400] + lines + b"\r\n" + bytes(refusal.body))
        self.transport.close()

"""Connections as uvicorn has them, but with a bound on a request's head."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Most of a request line and headers, give or take what one read brings."""


class Connection(HttpToolsProtocol):
    """Ends when a head grows too long: nobody checks it before it is whole, and it is kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._began, self._head_bytes = True, False, 0

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._began, self._head_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        """Its body follows."""
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Read on; what a head begins with may have come with the body before it."""
        self._began = False
        super().data_received(data)
        if self._in_head and not self._began and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.send_400_response(f"the request's head is longer than {HEAD_BYTES} bytes")

"""uvicorn's connections, with a bound on a request's head."""

from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES = 64 << 10
"""Most bytes of a request line and headers, give or take one read."""


class Connection(HttpToolsProtocol):
    """Closes when a head grows too long: uvicorn keeps it in memory and checks only a whole one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head, self._began, self._head_bytes = True, False, 0

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._in_head, self._began, self._head_bytes = True, True, 0

    def on_headers_complete(self) -> None:
        """The head is complete; its body follows."""
        self._in_head = False
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        """Read on; the beginning of a head may have come with the body before it."""
        self._began = False
        super().data_received(data)
        if self._in_head and not self._began and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self.send_400_response(f"the request's head is longer than {HEAD_BYTES} bytes")

"""A server that answers as OpenAI's API does, with whatever a test wants."""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and a body as JSON, as bytes, or as an iterator of a stream's pieces."""


def said(text: str, **more: Any) -> Reply:
    """An answer of a chat, or of a completion."""
    message = {"role": "assistant", "content": text, **more}
    choice = {"message": message, "text": text, "finish_reason": "stop"}
    return 200, {}, {"choices": [choice], "usage": {"completion_tokens": len(text)}}


def streamed(*pieces: str, tokens: int | None = None, done: bool = True) -> Reply:
    """An answer as a stream; tokens: what its usage says, if it has any."""

    def events() -> Iterator[bytes]:
        for piece in pieces:
            yield _event({"choices": [{"text": piece}]})
        if tokens is not None:
            yield _event({"choices": [], "usage": {"completion_tokens": tokens}})
        if done:
            yield b"data: [DONE]\n\n"

    return 200, {"Content-Type": "text/event-stream"}, events()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


@dataclass
class Stub:
    """What came in, and what goes out."""

    url: str
    reply: Callable[[dict[str, Any]], Reply] = field(default=lambda body: said("fine"))
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers (their names in lower case) and body of each request."""
    pages: dict[str, Any] = field(
        default_factory=lambda: {"/v1/models": {"data": [{"id": "stub", "owned_by": "tests"}]}}
    )
    """What GET answers: JSON, or text."""


@contextmanager
def openai_stub() -> Iterator[Stub]:
    """A server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = {name.lower(): value for name, value in self.headers.items()}
            stub.requests.append((self.path, given, body))
            status, headers, answer = stub.reply(body)
            if isinstance(answer, Iterator):
                self._begin(status, {**headers, "Transfer-Encoding": "chunked"})
                with contextlib.suppress(ConnectionError):  # the client hung up
                    for piece in itertools.chain(answer, [b""]):
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                return
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self._begin(status, {**headers, "Content-Length": str(len(data))})
            self.wfile.write(data)

        def do_GET(self) -> None:
            page = stub.pages.get(self.path)
            data = page.encode() if isinstance(page, str) else json.dumps(page).encode()
            self._begin(404 if page is None else 200, {"Content-Length": str(len(data))})
            self.wfile.write(data)

        def _begin(self, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = Stub(f"http://127.0.0.1:{server.server_address[1]}/v1")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield stub
    server.shutdown()
    server.server_close()

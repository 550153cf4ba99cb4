"""A server that answers as OpenAI's API does, with whatever a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], Any]
"""Status, headers, and a body as JSON, or as bytes."""


def said(text: str, **more: Any) -> Reply:
    """An answer of a chat, or of a completion."""
    choice = {"message": {"role": "assistant", "content": text, **more}, "text": text}
    return 200, {}, {"choices": [choice], "usage": {"completion_tokens": len(text)}}


@dataclass
class Stub:
    """What came in, and what goes out."""

    url: str
    reply: Callable[[dict[str, Any]], Reply] = field(default=lambda body: said("fine"))
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers (their names in lower case) and body of each request."""


@contextmanager
def openai_stub() -> Iterator[Stub]:
    """A server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = {name.lower(): value for name, value in self.headers.items()}
            stub.requests.append((self.path, given, body))
            status, headers, answer = stub.reply(body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub = Stub(f"http://127.0.0.1:{server.server_address[1]}/v1")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield stub
    server.shutdown()
    server.server_close()

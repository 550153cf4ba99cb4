"""A Hugging Face hub that holds one model, as the hub's own client sees it."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub_stub(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """A server's URL, and the names of the files that were fetched from it.

    Every model's files are those of `directory`.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(send=False)

        def do_GET(self) -> None:
            self._answer(send=True)

        def _answer(self, send: bool) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/api/"):
                tree = "/tree/" in path
                data = json.dumps(_listed(directory) if tree else {"id": "a/b", "sha": COMMIT})
                return self._send(data.encode(), send)
            name = path.partition(f"/resolve/{COMMIT}/")[2]
            if send:
                fetched.append(name)
            return self._send((directory / name).read_bytes(), send)

        def _send(self, data: bytes, send: bool) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if send:
                self.wfile.write(data)

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", fetched
    server.shutdown()
    server.server_close()


def _listed(directory: Path) -> list[dict[str, Any]]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [
        {
            "type": "file",
            "path": str(path.relative_to(directory)),
            "size": path.stat().st_size,
            "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
        }
        for path in files
    ]

"""A small HTTP/1.1 client on asyncio, cheap enough to share cores with the server it measures."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from httpx2 import URL

from peagle.server_url import PORTS

LONGEST_LINE = 1 << 20
AT_ONCE = 0.1
"""Seconds within which a connection ends that its server had given up while it waited; one that
ends later was at work."""


class HttpSession:
    """A connection that is kept open for several requests; use it in an `async with`."""

    def __init__(self, root: URL, headers: Mapping[str, str] | None = None) -> None:
        self._root, self._headers = root, headers or {}
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._round_trip = 0.0
        """Seconds that connecting took."""

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect, if it is not connected. Raises `OSError`."""
        if self._streams is None or self._streams[1].is_closing():
            root, began = self._root, time.monotonic()
            port, tls = root.port or PORTS[root.scheme], root.scheme == "https" or None
            self._streams = await asyncio.open_connection(
                root.host, port, limit=LONGEST_LINE, ssl=tls
            )
            self._round_trip = time.monotonic() - began
        return self._streams

    def close(self) -> None:
        """Hang up, even in the middle of an answer."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def ask(self, method: str, path: str, body: bytes = b"") -> "Reply":
        """Send a request and read the head of its answer. Raises `OSError` and `EOFError`."""
        headers = {
            "Host": self._root.netloc.decode(),
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self._headers,
        }
        lines = [f"{method} {self._root.path.rstrip('/')}{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        request = "\r\n".join([*lines, "", ""]).encode() + body
        used, began = self._streams is not None, time.monotonic()
        try:
            return await self._send(request)
        except (ConnectionError, asyncio.IncompleteReadError):
            if not used or time.monotonic() - began > max(AT_ONCE, 2 * self._round_trip):
                raise
            self.close()  # a server may end a connection that waited for its next request
            return await self._send(request)

    async def _send(self, request: bytes) -> "Reply":
        reader, writer = await self.open()
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        return Reply.of(head, reader)

    async def get(self, path: str) -> bytes | None:
        """The body of a page; None if there is none. Raises `OSError` and `EOFError`."""
        reply = await self.ask("GET", path)
        body = await reply.body()
        if reply.last:
            self.close()
        return body if reply.status == 200 else None


@dataclass
class Reply:
    """An answer whose body is read as it comes."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    reader: asyncio.StreamReader

    @classmethod
    def of(cls, head: str, reader: asyncio.StreamReader) -> Self:
        """From the head of an answer. Raises `EOFError` for what is no HTTP."""
        first, *lines = head.split("\r\n")
        words = first.split()
        if len(words) < 2 or not words[1].isdigit():
            raise EOFError("what answers does not speak HTTP")
        pairs = (line.partition(":") for line in lines if line)
        return cls(int(words[1]), {n.lower(): value.strip() for n, _, value in pairs}, reader)

    @property
    def last(self) -> bool:
        """Whether the connection ends with it."""
        sized = {"content-length", "transfer-encoding"} & self.headers.keys()
        return not sized or self.headers.get("connection", "").lower() == "close"

    @property
    def streams(self) -> bool:
        """Whether it is a stream of events."""
        return self.headers.get("content-type", "").startswith("text/event-stream")

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body's pieces, as they come."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
        elif self.headers.get("transfer-encoding", "").lower() != "chunked":
            while part := await self.reader.read(LONGEST_LINE):
                yield part
        else:
            async for part in _chunked(self.reader):
                yield part

    async def events(
        self, hear: Callable[[], None] = lambda: None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Server-sent events up to [DONE], all of them JSON objects. hear: called with each part
        that comes.

        Raises `EOFError` when they end without it, and `ValueError` for what is no JSON object.
        """
        rest, done = b"", False
        async for part in self.parts():
            hear()
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    done = True
                elif line.startswith(b"data:"):
                    yield msgspec.json.decode(data, type=dict)
        if not done and rest.removeprefix(b"data:").strip() != b"[DONE]":
            raise EOFError("the stream ended without [DONE]")


async def _chunked(reader: asyncio.StreamReader) -> AsyncGenerator[bytes, None]:
    """A chunked body: at a time all chunks that have come whole, since each wait has its price."""
    held, ended = b"", False
    while not ended:
        read = await reader.read(LONGEST_LINE)
        if not read:
            raise EOFError("the answer ended in the middle")
        held, at, whole = held + read, 0, []
        while not ended and (begin := held.find(b"\r\n", at)) >= 0:
            size = int(held[at:begin].partition(b";")[0], 16)
            end = begin + 2 + size
            if len(held) < end + 2:
                break
            whole.append(held[begin + 2 : end])
            at, ended = end + 2, size == 0
        held = held[at:]
        if whole:
            yield b"".join(whole)

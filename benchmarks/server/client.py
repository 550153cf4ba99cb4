"""A small HTTP/1.1 client on asyncio, cheap enough to share two cores with the server."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

SECONDS = 120


class Connection:
    """A connection to a server on this machine, kept open for several requests."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(
        self, method: str, path: str, body: bytes = b"", content_type: str = "application/json"
    ) -> "Answer":
        """Send a request and read the head of its answer."""
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n"
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {
            name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        return Answer(int(status.split()[1]), headers, self._reader)


@asynccontextmanager
async def connect(port: int) -> AsyncGenerator[Connection, None]:
    """Connect; leaving the block hangs up, even in the middle of an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()


@dataclass
class Answer:
    """A response whose body is read as it comes."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([part async for part in self.parts()])

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """The body's pieces, as they were sent."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readexactly(2)

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Server-sent events until [DONE]. Raises `EOFError` when they end without it."""
        rest, done = b"", False
        async for part in self.parts():
            *lines, rest = (rest + part).split(b"\n\n")
            for line in lines:
                data = line.removeprefix(b"data: ")
                if data == b"[DONE]":
                    done = True
                else:
                    yield json.loads(data)
        if not done:
            raise EOFError("the stream ended without [DONE]")


async def ask(
    port: int, method: str, path: str, body: bytes = b"", content_type: str = "application/json"
) -> tuple[int, bytes]:
    """The status and the whole body of an answer."""
    async with asyncio.timeout(SECONDS), connect(port) as connection:
        answer = await connection.ask(method, path, body, content_type)
        return answer.status, await answer.body()


async def scrape(port: int) -> dict[str, float]:
    """Every sample of /metrics without histogram buckets, summed over the labels."""
    found: dict[str, float] = {}
    _, text = await ask(port, "GET", "/metrics")
    for line in text.decode().splitlines():
        if line and not line.startswith("#") and "_bucket" not in line:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0].removeprefix("vllm:")
            found[name] = found.get(name, 0.0) + float(value)
    return found

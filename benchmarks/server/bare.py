"""The least that HTTP costs in Python: `bare.py TARGET SPECULATIVE_CONFIG ENGINE_CONFIG PORT`.

Our engine behind a protocol of a few lines that checks nothing: whatever the server takes beyond
this is its own cost.
"""

import asyncio
import json
import sys

import uvloop

from peagle import LLM, AsyncLLM, EngineConfig, SamplingParams, SpeculativeConfig

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class Bare(asyncio.Protocol):
    """One request at a time per connection; its head has a Content-Length, spelled like this."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm, self._read = llm, b""
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client connected."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin to answer when the body is whole."""
        self._read += data
        head, _, body = self._read.partition(b"\r\n\r\n")
        if len(body) < int(head.partition(b"Content-Length: ")[2].partition(b"\r")[0]):
            return
        self._read = b""
        task = asyncio.ensure_future(self._answer(json.loads(body)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: dict[str, object]) -> None:
        params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True)
        head = HEAD
        async for chunk in self._llm.stream(asked["prompt"], params):
            data = b"data: " + json.dumps({"choices": [{"text": chunk.text}]}).encode() + b"\n\n"
            self._transport.write(head + b"%x\r\n" % len(data) + data + b"\r\n")
            head = b""
        self._transport.write(END)


async def serve(llm: AsyncLLM, port: int) -> None:
    """Serve until the process is ended."""
    loop = asyncio.get_running_loop()
    await (await loop.create_server(lambda: Bare(llm), "127.0.0.1", port)).serve_forever()


if __name__ == "__main__":
    target, speculative, engine, port = sys.argv[1:]
    speculation, config = SpeculativeConfig(**json.loads(speculative)), json.loads(engine)
    opened = AsyncLLM(lambda: LLM(target, speculation, EngineConfig(**config)))
    uvloop.run(serve(opened, int(port)))

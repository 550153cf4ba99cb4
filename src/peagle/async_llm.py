"""AsyncLLM: the engine on a thread of its own, for any number of concurrent streams."""

import asyncio
import contextlib
import queue
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable

from peagle.config import SamplingParams
from peagle.llm import LLM, Chunk, Prepared, Prompt


class EngineClosedError(Exception):
    """The engine was closed before the stream came to its end."""


class AsyncLLM:
    """Streams from one LLM, which belongs to this object's thread from here on."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._asked: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="peagle-engine", daemon=True)
        self._thread.start()

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """Complete one prompt, chunk by chunk; leaving the loop, or cancellation, ends it.

        Raises `InputError` when prompt or parameters cannot be used, and `EngineClosedError`
        once `close` was called.
        """
        how = params or SamplingParams()
        # beside the engine's thread, which goes on meanwhile
        prepared = await asyncio.to_thread(self._llm.prepare, prompt, how)
        stream = _Stream(prepared, asyncio.get_running_loop())
        self._ask(stream)
        try:
            while True:
                item = await stream.items.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.completion is not None:
                    return
        finally:
            stream.cancelled = True
            self._asked.put(stream)

    def close(self) -> None:
        """Stop the engine's thread; streams still open end with `EngineClosedError`."""
        with self._closing:
            self._closed = True
            self._asked.put(None)
        self._thread.join()

    def _ask(self, stream: "_Stream") -> None:
        with self._closing:
            if self._closed:
                raise EngineClosedError
            self._asked.put(stream)

    def _run(self) -> None:
        streams: dict[str, _Stream] = {}
        while self._obey(streams):
            try:
                chunks = self._llm.step()
            except Exception as error:
                self._fail(streams, error)
                continue
            _deliver((streams[chunk.request_id], chunk) for chunk in chunks)
            for chunk in chunks:
                if chunk.completion is not None:
                    del streams[chunk.request_id]
        self._fail(streams, EngineClosedError())

    def _obey(self, streams: dict[str, "_Stream"]) -> bool:
        """Take what was asked since the last step; sleep while idle. False: time to stop."""
        while not self._asked.empty() or not streams:
            stream = self._asked.get()
            if stream is None:
                return False
            if stream.cancelled:
                self._llm.cancel(stream.request_id)
                streams.pop(stream.request_id, None)
                continue
            try:
                stream.request_id = self._llm.submit(stream.prepared)
            except Exception as error:
                _deliver([(stream, error)])
                continue
            streams[stream.request_id] = stream
        return True

    def _fail(self, streams: dict[str, "_Stream"], error: Exception) -> None:
        for request_id in streams:
            self._llm.cancel(request_id)
        _deliver((stream, error) for stream in streams.values())
        streams.clear()


class _Stream:
    """What one caller asked of the engine's thread, and the way back."""

    def __init__(self, prepared: Prepared, loop: asyncio.AbstractEventLoop) -> None:
        self.prepared, self.loop = prepared, loop
        self.request_id = ""
        self.cancelled = False
        self.items: asyncio.Queue[Chunk | Exception] = asyncio.Queue()


def _deliver(items: Iterable[tuple[_Stream, Chunk | Exception]]) -> None:
    """Hand items to the waiting streams, waking each event loop once; some may be gone by now."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Chunk | Exception]]]
    by_loop = defaultdict(list)
    for stream, item in items:
        by_loop[stream.loop].append((stream, item))
    for loop, batch in by_loop.items():
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_hand_over, batch)


def _hand_over(batch: list[tuple[_Stream, Chunk | Exception]]) -> None:
    for stream, item in batch:
        stream.items.put_nowait(item)

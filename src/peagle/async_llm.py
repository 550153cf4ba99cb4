"""AsyncLLM: the engine on a thread of its own, for any number of concurrent streams."""

import asyncio
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future

from peagle.config import SamplingParams
from peagle.engine.engine import EngineDeadError
from peagle.llm import LLM, ChatTurn, Chunk, Prepared, Prompt

SHORT_PROMPT = 4096
"""Below this many characters or tokens, encoding takes less time than switching threads."""
PATIENCE = 1e-3
"""Seconds for which the engine's thread leaves the interpreter to event loops that wait."""


class EngineClosedError(Exception):
    """The engine was closed before the stream came to its end."""


class AsyncLLM:
    """Streams from one LLM, which is loaded and run on a thread of its own.

    `load` makes the LLM; what it raises is raised here. It runs on that thread because OpenMP keeps
    a team of threads for every thread that ever computed, and once two teams share the cores, both
    sleep between products: a CPU engine then ran at 0.4 of its speed.
    """

    def __init__(self, load: Callable[[], LLM]) -> None:
        self._asked: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self.failed = False
        """Whether an unrecoverable error ended the engine's thread."""
        loaded: Future[LLM] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(load, loaded), name="peagle-engine", daemon=True
        )
        self._thread.start()
        self.llm = loaded.result()
        """Other threads may only read its tokenizer, sizes and stats, and call `prepare`."""

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[Chunk]:
        """Complete one prompt, chunk by chunk; leaving the loop, or cancellation, ends it.

        Raises `InputError` when prompt or parameters cannot be used, and `EngineClosedError`
        once `close` was called.
        """
        prepared = await self.prepare(prompt, params or SamplingParams())
        async with self.run([prepared]) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, chat: ChatTurn | None = None
    ) -> Prepared:
        """Encode and compile, long work on another thread, so that no stream is delayed."""
        free = params.structured_outputs is None and (chat is None or chat.use is None)
        if len(prompt) < SHORT_PROMPT and free:
            return self.llm.prepare(prompt, params, chat)
        return await asyncio.to_thread(self.llm.prepare, prompt, params, chat)

    @contextlib.asynccontextmanager
    async def run(
        self, prepared: Sequence[Prepared]
    ) -> AsyncGenerator[AsyncIterator[tuple[int, Chunk]], None]:
        """Complete several requests at once; yields each chunk with its request's index.

        They are submitted on entering the block; leaving it cancels those still running, and so
        does an error in any of them.
        """
        items: asyncio.Queue[tuple[int, Chunk | Exception]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        streams = [_Stream(index, one, loop, items) for index, one in enumerate(prepared)]
        try:
            for stream in streams:
                self._ask(stream)
            yield _chunks(items, len(streams))
        finally:
            for stream in streams:
                stream.cancelled = True
                self._asked.put(stream)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

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

    def _run(self, load: Callable[[], LLM], loaded: Future[LLM]) -> None:
        try:
            llm = load()
        except BaseException as error:
            loaded.set_exception(error)
            return
        self.llm = llm
        loaded.set_result(llm)
        streams: dict[str, _Stream] = {}
        try:
            while self._obey(streams):
                try:
                    chunks = self.llm.step()
                except EngineDeadError:
                    raise
                except Exception as error:
                    self._fail(streams, error)
                    continue
                self._hand_out(streams, chunks)
            self._fail(streams, EngineClosedError())
        except BaseException:
            self.failed = True
            raise
        finally:
            self._end(streams)

    def _hand_out(self, streams: dict[str, "_Stream"], chunks: Sequence[Chunk]) -> None:
        """Deliver a step's chunks; streams that it completes are forgotten."""
        brought = [(streams[chunk.request_id], chunk) for chunk in chunks]
        taken = _deliver(brought)
        if self.llm.engine.runs_ahead or not all(stream.begun for stream, _ in brought):
            _wait_for(taken)
        for stream, chunk in brought:
            stream.begun = True
            if chunk.completion is not None:
                del streams[chunk.request_id]

    def _obey(self, streams: dict[str, "_Stream"]) -> bool:
        """Submit and cancel what was asked since the last step; sleep while idle. False: stop."""
        while not self._asked.empty() or not streams:
            stream = self._asked.get()
            if stream is None:
                return False
            if stream.cancelled:
                self.llm.cancel(stream.request_id)
                streams.pop(stream.request_id, None)
                continue
            try:
                stream.request_id = self.llm.submit(stream.prepared)
            except Exception as error:
                _deliver([(stream, error)])
                continue
            streams[stream.request_id] = stream
        return True

    def _fail(self, streams: dict[str, "_Stream"], error: Exception) -> None:
        """Tell all streams, then cancel them."""
        failed = list(streams)
        _deliver((stream, error) for stream in streams.values())
        streams.clear()
        for request_id in failed:
            self.llm.cancel(request_id)

    def _end(self, streams: dict[str, "_Stream"]) -> None:
        """Tell every waiting stream that nothing more comes, and accept no more requests."""
        waiting = [*streams.values()]
        with self._closing:
            self._closed = True
            while not self._asked.empty():
                stream = self._asked.get()
                waiting += [stream] if stream is not None and not stream.cancelled else []
        _deliver((stream, EngineClosedError()) for stream in waiting)


class _Stream:
    """One request to the engine's thread, and where its chunks go."""

    def __init__(
        self,
        index: int,
        prepared: Prepared,
        loop: asyncio.AbstractEventLoop,
        items: asyncio.Queue[tuple[int, Chunk | Exception]],
    ) -> None:
        self.index, self.prepared, self.loop, self.items = index, prepared, loop, items
        self.request_id = ""
        self.begun = False
        """Whether its first tokens were delivered."""
        self.cancelled = False


async def _chunks(
    items: asyncio.Queue[tuple[int, Chunk | Exception]], running: int
) -> AsyncIterator[tuple[int, Chunk]]:
    """The chunks as they arrive, until the last of `running` requests has ended."""
    while running:
        index, item = await items.get()
        if isinstance(item, Exception):
            raise item
        running -= item.completion is not None
        yield index, item


def _deliver(items: Iterable[tuple[_Stream, Chunk | Exception]]) -> list[threading.Event]:
    """Hand items to the waiting streams, waking each event loop once; some may be closed by now.

    Each event is set once the tasks that waited have had their turn.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Chunk | Exception]]]
    by_loop = defaultdict(list)
    for stream, item in items:
        by_loop[stream.loop].append((stream, item))
    taken = []
    for loop, batch in by_loop.items():
        event = threading.Event()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_hand_over, batch, event)
            taken.append(event)
    return taken


def _wait_for(taken: Iterable[threading.Event]) -> None:
    """Let event loops have the interpreter before the next launch holds it for half a millisecond.

    A GPU meanwhile works on the next step, unless these are the first tokens of all that runs. On a
    CPU, whose next step takes all processors, only first tokens are worth the wait.
    """
    end = time.monotonic() + PATIENCE
    for event in taken:
        event.wait(max(end - time.monotonic(), 0))


def _hand_over(batch: list[tuple[_Stream, Chunk | Exception]], taken: threading.Event) -> None:
    for stream, item in batch:
        stream.items.put_nowait((stream.index, item))
    asyncio.get_running_loop().call_soon(taken.set)  # after the tasks that the items wake

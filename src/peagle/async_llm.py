"""AsyncLLM: the engine on a thread of its own, for any number of concurrent streams."""

import asyncio
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future

from peagle.completion import Chunk, Completion
from peagle.config import SamplingParams
from peagle.encoder import Prompt
from peagle.engine.engine import EngineDeadError
from peagle.live_request import ChatTurn, Prepared
from peagle.llm import LLM
from peagle.preparation import Kind, Preparation, kind_of

SHORT_PROMPT = 4096
"""Below this many characters or tokens, encoding takes less time than switching threads."""
PATIENCE = 1e-3
"""Seconds for which the engine's thread leaves the interpreter to event loops that wait."""
BACKLOG = 0.1
"""The same where the engine runs in another process. Meanwhile its outputs gather, and what took
too long for each token is then done for several at once."""


Batch = Sequence[tuple[int, Chunk]]
"""Chunks in order, each with its request's index."""


class EngineClosedError(Exception):
    """The engine was closed, or failed, before the stream came to its end."""

    def __init__(self, failed: bool = False) -> None:
        super().__init__("the engine failed" if failed else "the engine was closed")
        self.failed = failed


class AsyncLLM:
    """Streams from one LLM, which is loaded and run on a thread of its own.

    `load` makes the LLM; what it raises is raised here. It runs on that thread because OpenMP keeps
    a team of threads for every thread that ever computed, and once two teams share the cores, both
    sleep between products: a CPU engine then ran at 0.4 of its speed.
    """

    def __init__(self, load: Callable[[], LLM]) -> None:
        self._asked: queue.SimpleQueue[_Stream | None] = queue.SimpleQueue()
        self.preparation = Preparation()
        """Where requests are made ready."""
        self._closing = threading.Lock()
        self._closed = False
        self._streams: dict[str, _Stream] = {}
        """Those that run, by their requests' ids."""
        self.failed = False
        """Whether an unrecoverable error ended the engine's thread, or a step does not end."""
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
        async with self.run([prepared]) as batches:
            async for batch in batches:
                for _, chunk in batch:
                    yield chunk

    async def complete(self, prepared: Prepared) -> Completion:
        """Complete a request, of which nothing is handed over before its end.

        Raises `EngineClosedError` once `close` was called.
        """
        async with self.run([prepared], followed=False) as batches:
            async for [(_, chunk)] in batches:
                if chunk.completion is not None:
                    return chunk.completion
        raise AssertionError("a request ends with its completion")

    async def prepare(
        self, prompt: Prompt, params: SamplingParams, chat: ChatTurn | None = None
    ) -> Prepared:
        """Encode and compile, long work on another thread, so that no stream is delayed.

        Raises `InputError` as `LLM.prepare` does, and `EngineClosedError` where the engine ends
        meanwhile.
        """
        bound = params.structured_outputs is not None or (chat is not None and chat.use is not None)
        if len(prompt) < SHORT_PROMPT and not bound and not params.bad_words:
            return self.llm.prepare(prompt, params, chat)
        kind: Kind = "form" if bound else kind_of(len(prompt))
        try:
            return await self.preparation.run(kind, self.llm.prepare, prompt, params, chat)
        except EngineDeadError:  # it was to compile a form
            raise EngineClosedError(failed=self.failed or not self._closed) from None

    @contextlib.asynccontextmanager
    async def run(
        self, prepared: Sequence[Prepared], followed: bool = True
    ) -> AsyncGenerator[AsyncIterator[Batch], None]:
        """Complete several requests at once; yields what came since the last turn, in one piece.

        They are submitted on entering the block; leaving it cancels those still running, and so
        does an error in any of them. followed: as in `LLM.submit`.
        """
        inbox = _Inbox()
        streams = [_Stream(index, one, followed, inbox) for index, one in enumerate(prepared)]
        try:
            for stream in streams:
                self._ask(stream)
            yield _batches(inbox, len(streams))
        finally:
            for stream in streams:
                stream.cancelled = True
                self._put(stream)

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def responds(self) -> bool:
        """Whether the engine steps, or could."""
        return self.alive and not self.failed and self.llm.engine.responds

    def watch(self) -> None:
        """Fail once a step does not end."""
        self.llm.engine.watch(self._give_up)

    def close(self, seconds: float | None = None) -> None:
        """Stop the engine's thread; streams still open end with `EngineClosedError`.

        seconds: after which an engine in another process is killed, and after as many again the
        thread is left to itself, as `alive` then says; None: this waits.
        """
        with self._closing:
            self._closed = True
            self._put(None)
        self._thread.join(seconds)
        if self._thread.is_alive():
            self.llm.engine.kill()
            self._thread.join(seconds)
        self.abandon()

    def abandon(self) -> None:
        """Accept no more requests, and end all streams with `EngineClosedError`, at once."""
        waiting = [*self._streams.values()]
        with self._closing:
            self._closed = True
            while not self._asked.empty():
                stream = self._asked.get()
                waiting += [stream] if stream is not None and not stream.cancelled else []
        _deliver((stream, EngineClosedError(self.failed)) for stream in waiting)

    def _give_up(self) -> None:
        self.failed = True
        self.abandon()

    def _ask(self, stream: "_Stream") -> None:
        with self._closing:
            if self._closed:
                raise EngineClosedError(self.failed)
            self._put(stream)

    def _put(self, stream: "_Stream | None") -> None:
        self._asked.put(stream)
        self.llm.engine.wake()

    def _run(self, load: Callable[[], LLM], loaded: Future[LLM]) -> None:
        try:
            llm = load()
        except BaseException as error:
            loaded.set_exception(error)
            return
        self.llm = llm
        loaded.set_result(llm)
        try:
            while self._obey():
                try:
                    chunks = self.llm.step()
                except EngineDeadError:
                    raise
                except Exception as error:
                    self._fail(error)
                    continue
                self._hand_out(chunks)
            self._fail(EngineClosedError())
        except BaseException:
            if not self._closed:  # else it was killed
                self.failed = True
                raise
        finally:
            self.abandon()
            llm.close()

    def _hand_out(self, chunks: Sequence[Chunk]) -> None:
        """Deliver a step's chunks; streams that it completes are forgotten."""
        brought = [(self._streams[chunk.request_id], chunk) for chunk in chunks]
        taken = _deliver(brought)
        engine = self.llm.engine
        begins = not all(stream.begun for stream, _ in brought)
        if not engine.in_process:
            _wait_for(taken, BACKLOG)
        elif engine.runs_ahead or begins:
            _wait_for(taken, PATIENCE)
        for stream, chunk in brought:
            stream.begun = True
            if chunk.completion is not None:
                del self._streams[chunk.request_id]

    def _obey(self) -> bool:
        """Submit and cancel what was asked since the last step; sleep while idle. False: stop.

        An engine in another process is waited for in its step, which tells if it ends.
        """
        in_process = self.llm.engine.in_process
        while not self._asked.empty() or (in_process and not self._streams):
            stream = self._asked.get()
            if stream is None:
                return False
            if stream.cancelled:
                self.llm.cancel(stream.request_id)
                self._streams.pop(stream.request_id, None)
                continue
            try:
                stream.request_id = self.llm.submit(stream.prepared, stream.followed)
            except Exception as error:
                _deliver([(stream, error)])
                continue
            self._streams[stream.request_id] = stream
        return True

    def _fail(self, error: Exception) -> None:
        """Tell all streams, then cancel them."""
        failed = list(self._streams)
        _deliver((stream, error) for stream in self._streams.values())
        self._streams.clear()
        for request_id in failed:
            self.llm.cancel(request_id)


class _Inbox:
    """What the engine has brought for one call of `run`; made and used on its event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._chunks: list[tuple[int, Chunk]] = []
        self._error: Exception | None = None
        self._come = asyncio.Event()

    def put(self, index: int, item: Chunk | Exception) -> None:
        """Add an item of a request, and wake who waits."""
        if isinstance(item, Exception):
            self._error = self._error or item
        else:
            self._chunks.append((index, item))
        self._come.set()

    async def take(self) -> Batch:
        """All chunks that have come, at least one. Raises the first error behind them."""
        await self._come.wait()
        if not self._chunks and self._error is not None:
            raise self._error
        chunks, self._chunks = self._chunks, []
        if self._error is None:
            self._come.clear()
        return chunks


class _Stream:
    """One request to the engine's thread, and where its chunks go."""

    def __init__(self, index: int, prepared: Prepared, followed: bool, inbox: _Inbox) -> None:
        self.index, self.prepared, self.followed, self.inbox = index, prepared, followed, inbox
        self.request_id = ""
        self.begun = False
        """Whether its first tokens were delivered."""
        self.cancelled = False


async def _batches(inbox: _Inbox, running: int) -> AsyncIterator[Batch]:
    """The chunks as they arrive, until the last of `running` requests has ended."""
    while running:
        batch = await inbox.take()
        for _, chunk in batch:
            running -= chunk.completion is not None
        yield batch


def _deliver(items: Iterable[tuple[_Stream, Chunk | Exception]]) -> list[threading.Event]:
    """Hand items to the waiting streams, waking each event loop once; some may be closed by now.

    Each event is set once the tasks that waited have had their turn.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Chunk | Exception]]]
    by_loop = defaultdict(list)
    for stream, item in items:
        by_loop[stream.inbox.loop].append((stream, item))
    taken = []
    for loop, batch in by_loop.items():
        event = threading.Event()
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(_hand_over, batch, event)
            taken.append(event)
    return taken


def _wait_for(taken: Iterable[threading.Event], seconds: float) -> None:
    """Let event loops have the interpreter before the next launch holds it for half a millisecond.

    A GPU meanwhile works on the next step, unless these are the first tokens of all that runs. On a
    CPU, whose next step takes all processors, only first tokens are worth the wait.
    """
    end = time.monotonic() + seconds
    for event in taken:
        event.wait(max(end - time.monotonic(), 0))


def _hand_over(batch: list[tuple[_Stream, Chunk | Exception]], taken: threading.Event) -> None:
    for stream, item in batch:
        stream.inbox.put(stream.index, item)
    asyncio.get_running_loop().call_soon(taken.set)  # after the tasks that the items wake

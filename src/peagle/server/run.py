"""The server's life: listen, serve, drain on SIGTERM, end."""

import asyncio
import errno
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import FrameType

import uvicorn

from peagle.async_llm import AsyncLLM
from peagle.engine_client.process import EngineProcess
from peagle.errors import InputError, reason
from peagle.llm import LLM
from peagle.server.app import create_app
from peagle.server.connection import Connection
from peagle.server.middleware import LineFormatter
from peagle.server.service import Service
from peagle.server.settings import LogFormat, ServerSettings
from peagle.server.siblings import Siblings

Announce = Callable[[AsyncLLM, str], object]
"""Tells what is served, and its address."""
BACKLOG = 2048
FAREWELL = 2
"""Seconds for what is still open after the time to drain: a body that never comes, a stream that
nobody reads."""
TICKS_A_LINE = 100
"""Ten seconds of uvicorn's ticks."""
LAST = 0.8
"""Seconds after a second signal for telling whoever has an open request."""
KILL_AFTER = 10
"""How many times as long one of several processes has for ending then."""
LOOK = 0.1
"""Seconds between two looks at these."""
TICKS_A_COUNT = 10
SIGNALS = (signal.SIGINT, signal.SIGTERM)
DRAIN = signal.SIGUSR1
"""Asks one of several processes to drain, and again to end; other signals are for all of them."""
TURN = 5e-4
"""Seconds for which a thread keeps the interpreter while another waits, with a GPU: other requests
must be read while a thread makes text of a step's tokens, or launches a long prompt, which takes 20
ms. On a CPU Python's own interval is better: a thread let in there takes a processor from a
product."""
log = logging.getLogger("peagle.server")


def bind(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """A listening socket, taken before the model is loaded. Raises `InputError`.

    Only a listening socket keeps the address from others. Clients that connect meanwhile wait.
    is_shared: with others of this kind.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
        cure = "; give another --port, or 0 for a free one" if taken else ""
        raise InputError(f"cannot listen on {host}:{port}: {reason(error)}{cure}") from None
    return listener


def end_on_sigterm() -> None:
    """Let SIGTERM end the process while it loads, even as a container's first process.

    It ends at once: the thread that loads cannot be stopped, and there is nothing to clean up.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def serve(
    llm: AsyncLLM,
    settings: ServerSettings,
    listener: socket.socket,
    announce: Announce | None = None,
    siblings: Siblings | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C, then finish what runs.

    announce: is called once it answers; None logs it. siblings: of which this is one, and ends by
    `DRAIN`. Returns the exit code: 1 if the engine failed, so that the process is started again.
    """
    set_up_log(settings.log_format)
    faulthandler.register(signal.SIGUSR2, all_threads=True)  # where is it?
    llm.llm.build_grammars()
    llm.watch()
    if llm.llm.engine.runs_ahead:
        sys.setswitchinterval(TURN)
    app = create_app(llm, settings)
    config = uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        backlog=BACKLOG,
        lifespan="off",
        ws="none",
        timeout_keep_alive=settings.timeout_keep_alive,
        timeout_graceful_shutdown=FAREWELL,
    )
    service: Service = app.state.service
    told = partial(announce or partial(_log_start, settings), llm)
    server = DrainingServer(config, service, told)
    if siblings is not None:
        service.siblings = service.metrics.siblings = siblings
        signal.signal(DRAIN, server.handle_exit)
    if service.siblings.index == 0:
        _warn(llm, settings, listener.getsockname()[0])
    try:
        server.run(sockets=[listener])
    finally:
        service.close()
        if llm.alive:  # in a step that does not end
            server.leave_after(FAREWELL)
    return service.exit_code


def serve_fronts(
    llm: LLM, settings: ServerSettings, listener: socket.socket, announce: Announce | None
) -> int:
    """As `serve`, by as many forks of this process as `llm` was loaded for.

    listener: the first one's, shared with those of the others. It returns in each fork, and here
    once all of them and the engine have ended.
    """
    faulthandler.register(signal.SIGUSR2)  # else it would end this
    engine, pids = llm.engine, set[int]()
    assert isinstance(engine, EngineProcess)
    siblings = Siblings(len(engine.fronts))
    host, port = listener.getsockname()[:2]
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # forks, too, leave them to this process
    gc.freeze()  # what is here stays: forks that look through it to free it copy it, for seconds
    for index in range(len(engine.fronts)):
        listener = listener if index == 0 else bind(host, port, is_shared=True)
        if not (pid := os.fork()):
            llm.engine, siblings.index = engine.front(index), index
            code = serve(AsyncLLM(lambda: llm), settings, listener, announce, siblings)
            signal.signal(DRAIN, signal.SIG_IGN)  # Python's own end is not interrupted
            return code
        pids.add(pid)
        listener.close()  # where one has ended nobody is to wait
    engine.fronts.clear()  # each channel is closed once its fork has ended
    code = _wait(pids)
    if (end := engine.own_end) is not None:  # forks only see that their channels are closed
        log.error(f"the engine's process ended: {end}")
    engine.kill()  # whatever it does: nobody needs it
    engine.close()
    return code


def _wait(pids: set[int]) -> int:
    """Wait for the ends of processes, which are asked to drain by a signal or once one has ended,
    to end by a second signal, and killed if they do not, as one that is stopped. Returns the exit
    code: 1 if any failed."""
    asked: list[float] = []
    for number in SIGNALS:  # handlers: another thread would take what `sigwait` waits for
        signal.signal(number, lambda *_: asked.append(time.monotonic()))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code = told = 0
    while pids:
        ended = dict(found for pid in pids if (found := os.waitpid(pid, os.WNOHANG))[0])
        pids -= ended.keys()
        codes = [os.waitstatus_to_exitcode(status) for status in ended.values()]
        code |= any(one not in (0, -DRAIN) for one in codes)
        if codes and not asked:
            log.error(f"a process in front ended with code {codes[0]}; the others drain")
            asked.append(time.monotonic())
        is_late = len(asked) > 1 and time.monotonic() > asked[1] + KILL_AFTER * LAST
        if is_late or told < len(asked):
            told += 1
            for pid in pids:
                os.kill(pid, signal.SIGKILL if is_late else DRAIN)
        time.sleep(LOOK)
    return code


def _warn(llm: AsyncLLM, settings: ServerSettings, host: str) -> None:
    """Warn of surprises: a server open to all, a template that refuses every question. Tell the
    seed, by which answers can be had again."""
    log.info(f"requests without a seed get seeds from {llm.llm.engine.facts.seed} upwards")
    if not settings.api_keys and host not in ("127.0.0.1", "::1"):
        log.warning("no API key: whoever reaches this port can use it; see --api-key")
    if llm.llm.chat_config.chat_template or llm.llm.tokenizer.chat_template:
        try:
            llm.llm.render([{"role": "user", "content": "Hello"}])
        except InputError as error:
            log.warning(f"a plain question fails: {error}")


def _log_start(settings: ServerSettings, llm: AsyncLLM, url: str) -> None:
    log.info(f"the KV cache holds {llm.llm.engine.facts.kv_tokens:,} tokens")
    log.info(f"serving {settings.model_names[0]} on {url}, {llm.llm.dialect.description}")


class DrainingServer(uvicorn.Server):
    """Keeps listening while it drains, so that probes get 503 and not a closed port.

    A second signal ends it at once. Neither waits for what does not end: after its time the process
    is left, with its threads wherever they are.
    """

    def __init__(
        self, config: uvicorn.Config, service: Service, announce: Callable[[str], object]
    ) -> None:
        super().__init__(config)
        self._service, self._announce = service, announce
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: Future[None] | None = None
        self._auditing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, and say so."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self._service.auditor is not None:
            self._auditing = asyncio.ensure_future(self._service.auditor.run())
        for listener in (sockets or ()) if self._service.siblings.index == 0 else ():
            host, port = listener.getsockname()[:2]
            self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def on_tick(self, counter: int) -> bool:
        """Whether to end, asked ten times a second; also when the engine has failed. Tells the
        figures of traffic now and then."""
        if counter and counter % TICKS_A_LINE == 0 and (line := self._service.metrics.line()):
            log.info(line)
        if counter % TICKS_A_COUNT == 0 and len(self._service.siblings.counts) > 1:
            self._service.metrics.tell()
        if self._service.distrusted and not self._service.draining:
            self.handle_exit(signal.SIGTERM, None)
        return await super().on_tick(counter) or self._service.failed

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; called for SIGTERM and SIGINT."""
        loop = None if self._loop is None or self._loop.is_closed() else self._loop
        if self._service.draining or loop is None:
            self.should_exit = self.force_exit = True
            self.leave_after(LAST)
            if loop is not None:
                loop.call_soon_threadsafe(self._service.abandon)
            return
        self._service.draining = True
        self._draining = asyncio.run_coroutine_threadsafe(self._drain(), loop)

    async def _drain(self) -> None:
        log.info("draining; Ctrl-C or SIGTERM again to stop now")
        await self._service.drain()
        with ThreadPoolExecutor(1) as apart:  # requests may keep all other threads
            await asyncio.get_running_loop().run_in_executor(apart, self._service.close)
        self.should_exit = True
        self.leave_after(2 * FAREWELL)

    def leave_after(self, seconds: float) -> None:
        """End the process after this time, whatever its threads do."""
        timer = threading.Timer(seconds, self._leave)
        timer.daemon = True
        timer.start()

    def _leave(self) -> None:
        self._service.abandon()
        os._exit(self._service.exit_code)


def set_up_log(form: LogFormat) -> None:
    """Log one line per record to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(LineFormatter(as_json=form == "json"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for talkative in ("uvicorn", "httpx"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    logging.getLogger("uvicorn.error").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's says more than ours on a request that was cut off."""
    return not record.getMessage().startswith("ASGI callable returned without")

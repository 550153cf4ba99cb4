"""An engine in a process of its own, seen from the one that starts it and from its forks."""

import contextlib
import itertools
import json
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch

from peagle.config import SamplingParams
from peagle.engine.engine import EngineDeadError, EngineStats
from peagle.engine.request import RequestOutput
from peagle.engine_client import messages
from peagle.engine_client.client import EngineClient, EngineStepError
from peagle.engine_client.form import Form
from peagle.engine_client.messages import Channel, Envelope, FromEngine, written_params
from peagle.engine_client.source import EngineSource
from peagle.errors import InputError

CHILD = "peagle.engine_client.child"
GRACE = 5.0
"""Seconds that the process has to end by itself once nothing more can come, and once it is
killed."""
WAIT = 1.0
"""Seconds after which a step that waits for the process returns without anything."""
SILENCE = 10.0
"""Seconds without a beat after which the process does not respond: it is stopped, or its
interpreter is kept."""
SPARE = 30.0
"""Seconds of silence beyond the limit of a step after which the process is ended: it should have
ended itself."""
THREADS = "OMP_NUM_THREADS"
NONE: Mapping[str, str] = {}
log = logging.getLogger("peagle.engine")


class RemoteTracebackError(Exception):
    """Where an exception came from in the other process; shown as the cause of one here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteEngine(EngineClient):
    """Waits until the engine is loaded, which then runs its steps without being asked.

    pid: of its process. `compile` waits until another thread's `step` brings the answer. Raises
    `InputError` as `EngineSource.load` does.
    """

    in_process = False

    def __init__(self, channel: Channel[FromEngine], pid: int) -> None:
        self._channel, self.pid = channel, pid
        self._waker, self._woken = socket.socketpair()
        # who wakes must not wait for who sleeps
        self._waker.setblocking(False)
        self._come: deque[FromEngine] = deque()
        """Messages that were read and are to be taken: a failure not before what came ahead of
        it."""
        self._running: set[str] = set()
        self._calling = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, Future[messages.Answered]] = {}
        self.ended = False
        """Whether the process is gone, as far as is known."""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        try:
            ready = self._loaded()
        except BaseException:
            self.close()
            raise
        self._stats, self._stepped = ready.stats, False
        super().__init__(ready.facts, pid)
        self._heard, self._age = time.monotonic(), 0.0
        """When the process was heard last, and how old its step was then."""
        if not math.isinf(limit := self.facts.step_timeout):
            self._channel.limit_sends(limit + SPARE)

    @property
    def stats(self) -> EngineStats:
        return (
            replace(self._stats, running=0, waiting=0, kv_usage=0.0) if self.ended else self._stats
        )

    @property
    def step_age(self) -> float:
        silence = time.monotonic() - self._heard
        return self._age + silence if self._age or silence > SILENCE else 0.0

    @property
    def responds(self) -> bool:
        is_heard = time.monotonic() - self._heard <= SILENCE
        return is_heard and not self.ended and super().responds

    @property
    def takes(self) -> bool:
        """Whether the process responds, and what is sent would go out at once."""
        return self.responds and not self._channel.is_full

    def fileno(self) -> int:
        """The descriptor that can be read once something has come, or `wake` was called."""
        return self._selector.fileno()

    def watch(self, give_up: Callable[[], object]) -> None:
        """Do nothing: the process watches itself, and `step` watches whether it is heard."""

    def compile(self, form: Form) -> None:
        if form.grammar is not None:  # rules for single tokens cannot be wrong
            settle(self.ask(form))

    def ask(self, form: Form) -> Future[messages.Answered]:
        """Have a form compiled. What comes of it is to be settled."""
        answer: Future[messages.Answered] = Future()
        with self._calling:
            if self.ended:
                raise EngineDeadError("the engine's process has ended")
            # noted before it is sent: the answer may come at once, and an end answers all that are
            # noted
            number = next(self._numbers)
            self._calls[number] = answer
        self._send(messages.Compile(number, form))
        return answer

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, form: Form | None
    ) -> int:
        self._running.add(request_id)
        self._send(messages.Add(request_id, list(prompt), written_params(params), form))
        return 0

    def abort(self, request_id: str, reason: str = "abort") -> None:
        if request_id in self._running:
            self._running.remove(request_id)
            self._send(messages.Abort(request_id, reason))

    def step(self, seconds: float = WAIT) -> list[RequestOutput]:
        """Wait for the outputs of steps, all that have come; there are none after `wake`, nor after
        so many seconds."""
        if not self._come:
            ready = [key.fileobj for key, _ in self._selector.select(seconds)]
            if self._woken in ready:
                self._woken.recv(4096)
            if self._channel not in ready:
                self._miss()
                return []
            try:
                self._come += self._channel.receive_all()
            except (EOFError, OSError):
                raise EngineDeadError(f"the engine's process ended: {self._end()}") from None
        outputs: list[RequestOutput] = []
        while self._come and not (outputs and isinstance(self._come[0], messages.Failed)):
            outputs += self._take(self._come.popleft())
        return outputs

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken often enough, or is closed
            self._waker.send(b"\0")

    def kill(self) -> None:
        """Let nothing pass any more: only who started the process may end it."""
        self._channel.end()

    def close(self) -> None:
        """Say nothing any more."""
        self._channel.close()
        self._end()
        self._selector.close()
        for each in (self._waker, self._woken):
            each.close()

    def _miss(self) -> None:
        """Raise `EngineDeadError` for a process that was not heard for too long."""
        silence = time.monotonic() - self._heard
        if silence > self.facts.step_timeout + SPARE:
            self.kill()
            told = f"the engine's process {self.pid} said nothing for {silence:.0f} s"
            raise EngineDeadError(f"{told}: {self._end()}")

    def _take(self, message: FromEngine) -> list[RequestOutput]:
        self._heard, self._age = time.monotonic(), 0.0
        match message:
            case messages.Beat(age, stats):
                # those of a step that came since the last beat may be newer
                self._age, self._stats = age, self._stats if self._stepped else stats
                self._stepped = False
            case messages.Stepped(outputs, stats):
                self._stats, self._stepped = stats, True
                return self._wanted(outputs)
            case messages.Answered(number):
                self._calls.pop(number).set_result(message)
            case messages.Failed(error, traceback, dead):
                kind = EngineDeadError if dead else EngineStepError
                raise kind(error) from RemoteTracebackError(traceback)
            case _:
                raise AssertionError("an engine is loaded once")
        return []

    def _wanted(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs of requests that were not aborted meanwhile."""
        # the process had sent these before it read that their request is aborted
        wanted = [output for output in outputs if output.request_id in self._running]
        for output in wanted:
            if output.finish_reason is not None:
                self._running.remove(output.request_id)
        return wanted

    def _loaded(self) -> messages.Ready:
        try:
            message = self._channel.receive()
        except (EOFError, OSError):
            raise InputError(f"the engine's process ended while it loaded: {self._end()}") from None
        match message:
            case messages.Ready():
                return message
            case messages.Refused(complaint):
                raise InputError(complaint)
            case messages.Failed(error, traceback):
                raise EngineDeadError(error) from RemoteTracebackError(traceback)
        raise AssertionError("before it is loaded an engine does nothing")

    def _send(self, message: Envelope) -> None:
        try:
            self._channel.send(message)
        except BlockingIOError:  # it takes nothing in, and may have half of a message
            self.kill()
        except OSError:  # it has ended, as the next step will say
            pass

    def _end(self) -> str:
        """Fail what waits for the process, and say how it ended."""
        with self._calling:
            self.ended = True
            waiting = [*self._calls.values()]
            self._calls.clear()
        for answer in waiting:
            answer.set_exception(EngineDeadError("the engine's process has ended"))
        return "its channel is closed"


class EngineProcess(RemoteEngine):
    """Starts a process, which loads the engine of a source.

    variables: of its environment, in place of ours. fronts: forks of this process that will speak
    to the engine, in place of this one; 0: none. Raises `InputError` as `EngineSource.load` does.
    """

    def __init__(
        self, source: EngineSource, variables: Mapping[str, str] = NONE, fronts: int = 0
    ) -> None:
        self._process, (self._channel, *self.fronts) = _start(variables, 1 + fronts)
        """Here the channels of forks."""
        threads = int(variables.get(THREADS, torch.get_num_threads()))
        self._send(messages.Open(json.dumps(source.model_dump()), threads))
        super().__init__(self._channel, self._process.pid)

    def front(self, index: int) -> RemoteEngine:
        """The engine as a fork of this process has it, which closes what is not its own."""
        own, count = self.fronts[index], len(self.fronts)
        self.fronts.clear()
        self._channel.close()
        front = RemoteEngine(own, self.pid)
        front.ids = map(str, itertools.count(index, count))
        return front

    @property
    def own_end(self) -> str | None:
        """How the process ended by itself; None: it runs."""
        return None if self._process.poll() is None else self._end()

    def kill(self) -> None:
        self._process.kill()

    def _end(self) -> str:
        """Wait for the end of the process."""
        code = self._wait()
        if code is None:
            self.kill()
            code = self._wait()
        super()._end()
        if code is None:
            told = f"the device does not let go of pid {self.pid}"
            log.error(told)
            return told
        return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

    def _wait(self) -> int | None:
        """The exit code; None if the process does not end in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(GRACE)
        return None


def settle(answer: Future[messages.Answered]) -> None:
    """Wait for what came of a form. Raises `InputError` for a wrong one."""
    answered = answer.result()
    if answered.complaint is not None:
        raise InputError(answered.complaint)
    if answered.failed is not None:
        failed = answered.failed
        raise EngineStepError(failed.error) from RemoteTracebackError(failed.traceback)


def _start(
    variables: Mapping[str, str], count: int
) -> tuple["subprocess.Popen[bytes]", list[Channel[FromEngine]]]:
    """The process, and our ends of the socket pairs that it inherits the other ends of.

    It is in a session of its own, so that Ctrl-C in a terminal concerns only the one in front.
    """
    pairs = [socket.socketpair() for _ in range(count)]
    descriptors = [theirs.fileno() for _, theirs in pairs]
    process = subprocess.Popen(
        # -P: a module in the working directory is not taken for one of ours
        [sys.executable, "-P", "-m", CHILD, *map(str, descriptors)],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
        env={**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    for _, theirs in pairs:
        theirs.close()
    return process, [Channel(ours.detach(), FromEngine) for ours, _ in pairs]

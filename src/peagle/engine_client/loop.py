"""The engine's process from within: steps on one thread, messages and grammars on others."""

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from peagle.engine.engine import EngineDeadError
from peagle.engine.request import RequestOutput
from peagle.engine_client import messages
from peagle.engine_client.local import LocalEngine
from peagle.engine_client.messages import Channel, Envelope, ToEngine, read_params
from peagle.engine_client.source import EngineSource
from peagle.engine_client.watchdog import Watchdog
from peagle.errors import InputError
from peagle.models.tokenizer import load_tokenizer

PATIENCE = 10.0
"""Seconds for which one of several fronts may read nothing before it is left."""
STUCK = 70
"""The exit code after a step that did not end: sysexits' EX_SOFTWARE."""
TURN = 5e-4
"""Seconds for which launches keep the interpreter while a message waits to be read."""


def serve(descriptors: Sequence[int]) -> int:
    """Load the engine that the first message names, and run it until the other end is closed.

    descriptors: of the channel of who starts it, and those of several fronts that have its requests
    then. Returns an exit code: 1 after an error.
    """
    channels = [Channel[ToEngine](one, ToEngine) for one in descriptors]
    channel = channels[0]
    opened = channel.receive()
    assert isinstance(opened, messages.Open), "nothing runs before it is loaded"
    loop = EngineLoop(channels)
    for each in channels:
        read = partial(_read, each, loop, each is channel)
        threading.Thread(target=read, name="peagle-reader", daemon=True).start()
    try:
        try:
            engine = _load(opened)
        except InputError as error:
            channel.send(messages.Refused(str(error)))
            return 1
        loop.open(engine)
        return loop.run()
    except Exception as error:
        channel.send(_failed(error, dead=True))
        return 1


def _load(opened: messages.Open) -> LocalEngine:
    torch.set_num_threads(opened.threads)
    source = EngineSource(**json.loads(opened.source))
    engine = source.load(load_tokenizer(Path(source.target)))
    if engine.runs_ahead:
        sys.setswitchinterval(TURN)
    return engine


def _read(channel: Channel[ToEngine], loop: "EngineLoop", is_first: bool) -> None:
    """Pass messages on. Without the other end of the first channel there is nothing to do, and
    nobody to say it to: a step or a load that runs is cut off, which gives the memory back at
    once."""
    code = 1
    try:
        while True:
            loop.take(channel.receive(), channel)
    except (EOFError, OSError):
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        if code or is_first:
            os._exit(code)


class EngineLoop:
    """Steps an engine as long as it has requests, and tells of every step.

    channels: as `serve` has them. Of several fronts each has the requests whose ids leave its
    index, divided by their number.
    """

    def __init__(self, channels: Sequence[Channel[ToEngine]]) -> None:
        self._channels, self._fronts = channels, channels[1:] or channels
        self._asked: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        """What is to be done between two steps."""
        self._compiling = ThreadPoolExecutor(thread_name_prefix="peagle-grammars")

    def open(self, engine: LocalEngine) -> None:
        """Run this engine. Messages come only afterwards."""
        self._engine, self._core = engine, engine.core
        self._told = engine.stats
        self._send(messages.Ready(engine.facts, engine.stats), *self._channels)
        for channel in self._channels[1:]:
            channel.limit_sends(PATIENCE)  # others wait for it, too

    def take(self, message: ToEngine, front: Channel[ToEngine]) -> None:
        """Do what a front's message asks for, or have it done; steps wait for no grammar."""
        constraints = self._engine.constraints
        match message:
            case messages.Compile(call, form):
                self._compiling.submit(self._answer, front, call, partial(constraints.make, form))
            case messages.Add(request_id, prompt, params, form):
                constraint = None if form is None else constraints.make(form)
                ready = (request_id, prompt, read_params(params), constraint)
                self._asked.put(partial(self._core.add, *ready))
            case messages.Abort(request_id, reason):
                self._asked.put(partial(self._core.abort, request_id, reason))

    def run(self) -> int:
        """Step until the engine is lost; returns the exit code."""
        Watchdog(self._core, lambda: os._exit(STUCK), self._beat, kills=True).start()
        while True:
            self._obey()
            try:
                outputs = self._core.step()
            except EngineDeadError as error:
                self._send(_failed(error, dead=True), *self._fronts)
                return 1
            except Exception as error:
                for request_id in list(self._core.scheduler.requests):
                    self._core.abort(request_id)
                self._send(_failed(error), *self._fronts)
                continue
            if outputs:
                self._tell(outputs)

    def _obey(self) -> None:
        """Do what was asked for since the last step; sleep while there is nothing to run."""
        while not self._core.busy or not self._asked.empty():
            if self._asked.empty() and self._core.stats != self._told:
                self._tell([])
            self._asked.get()()

    def _beat(self) -> None:
        """Let those in front know that this process has turns, but for who reads nothing."""
        beat = messages.Beat(self._engine.step_age, self._core.stats)
        self._send(beat, *(front for front in self._fronts if not front.is_full))

    def _tell(self, outputs: list[RequestOutput]) -> None:
        """Give each front what its requests got; where none got anything, all have the stats."""
        self._told = self._core.stats
        shares = dict.fromkeys(range(len(self._fronts)), outputs)
        if outputs and len(shares) > 1:
            shares = {}
            for output in outputs:
                shares.setdefault(int(output.request_id) % len(self._fronts), []).append(output)
        for front, share in shares.items():
            if not self._send(messages.Stepped(share, self._told), self._fronts[front]):
                for output in share:  # nobody waits for it
                    self._core.abort(output.request_id)

    def _send(self, message: Envelope, *channels: Channel[ToEngine]) -> bool:
        """Whether no other end has ended, or has read nothing for too long."""
        is_sent = True
        for channel in channels:
            try:
                channel.send(message)
            except OSError:
                channel.end()  # half of the message may have gone
                is_sent = False
        return is_sent

    def _answer(self, front: Channel[ToEngine], call: int, work: Callable[[], object]) -> None:
        """Do some work and answer the call for it."""
        answer: Envelope = messages.Answered(call)
        try:
            work()
        except InputError as error:
            answer = messages.Answered(call, complaint=str(error))
        except Exception as error:
            answer = messages.Answered(call, failed=_failed(error))
        self._send(answer, front)


def _failed(error: Exception, dead: bool = False) -> messages.Failed:
    name = type(error).__name__
    return messages.Failed(f"{name}: {error}", "".join(traceback.format_exception(error)), dead)

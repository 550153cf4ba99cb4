"""A process in which work on what clients sent has bounds, and can be ended.

Its work is a function of this package that takes and returns what JSON holds: nothing is pickled,
and the process imports no more than the function's module does.
"""

import contextlib
import contextvars
import functools
import importlib
import json
import os
import resource
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import IO, Any, TypeVar

from peagle.errors import InputError

T = TypeVar("T")
CPU_SECONDS = 5
"""Seconds of a processor that one piece of work may take."""
WALL_SECONDS = 60.0
"""Seconds that it may take on a machine that has other work."""
MEMORY = 2 << 30
"""Bytes of addresses, of which a large stack takes half without using them."""
STACK = 1 << 30
"""Bytes of stack, of which only those used are allocated: rules are compiled recursively, each
within the one that names it, and a request may bring thousands."""
SIZING_STACKS = threading.Lock()
LOOK = 0.1
"""Seconds between two looks at whether anybody still waits."""
REMEMBERED = 256
"""Results that are kept: an agent sends the same schemas at every turn."""
NICE = 5
"""How far the process gives way: steps of an engine on a CPU go first."""
LEFT: contextvars.ContextVar[threading.Event] = contextvars.ContextVar("LEFT")
"""Set once nobody waits any more for what is done in this context."""


class Sandbox:
    """Starts its process when there is work, and again after one that had to be ended."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, function: Callable[[str], T], text: str) -> T:
        """What `function` returns for a text; one call at a time.

        Raises `InputError` as the function does, and where it needs too much time or memory, or
        nobody waits any more.
        """
        while not self._turn.acquire(timeout=LOOK):
            _refuse_if_left()
        try:
            _refuse_if_left()
            return self._answer([function.__module__, function.__qualname__, text, CPU_SECONDS])
        finally:
            self._turn.release()

    def _answer(self, asked: list[str | int]) -> Any:
        process = self._process or self._start()
        # kept again once it has answered: an interrupted process would answer the next question
        # with this answer
        self._process = None
        line = b""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(OSError):
                process.stdin.write(json.dumps(asked).encode() + b"\n")
                process.stdin.flush()
                line = _line(process.stdout)
        finally:
            if not line:
                process.kill()
                process.wait()
        if not line:
            raise InputError(
                "structured outputs: too complex: it takes too long, or too much memory"
            )
        self._process = process
        found = json.loads(line)
        if "refused" in found:
            raise InputError(found["refused"])
        return found["result"]

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "MALLOC_ARENA_MAX": "1",  # each would take addresses from those that are counted
            },
        )


def on_large_stack(work: Callable[[], T]) -> T:
    """Run some work on a thread with a large stack; returns or raises what the work does."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    with SIZING_STACKS:
        before = threading.stack_size(STACK)
        try:
            threading.Thread(target=run, name="peagle-grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
    return done.result()


SANDBOX = Sandbox()
"""The sandbox of this process."""


@functools.lru_cache(REMEMBERED)
def in_sandbox(function: Callable[[str], T], text: str) -> T:
    """As `Sandbox.call` of this process's own; the latest results are remembered."""
    return SANDBOX.call(function, text)


def _refuse_if_left() -> None:
    left = LEFT.get(None)
    if left is not None and left.is_set():
        raise InputError("nobody waits for it any more")


def _line(answers: IO[bytes]) -> bytes:
    """An answer; empty where the process ended or takes too long."""
    poll = select.poll()
    poll.register(answers, select.POLLIN)
    end = time.monotonic() + WALL_SECONDS
    while not poll.poll(1000 * LOOK):
        _refuse_if_left()
        if time.monotonic() > end:
            return b""
    return answers.readline()


def main() -> None:
    """Do what is asked for, line by line, until the other end is closed."""
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    on_large_stack(_serve)  # one for all: a stack is given back only some time after its thread


def _serve() -> None:
    for line in sys.stdin:
        module, name, text, seconds = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        # the limit counts from the process's start, and in whole seconds
        most = int(used.ru_utime + used.ru_stime) + 1 + seconds
        resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
        function = getattr(importlib.import_module(module), name)
        try:
            found = {"result": function(text)}
        except InputError as error:
            found = {"refused": str(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

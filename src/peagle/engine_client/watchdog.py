"""What notices that a step does not end, and then ends what it runs in."""

import faulthandler
import logging
import threading
import time
from collections.abc import Callable

from peagle.engine.engine import Engine

TICK = 1.0
"""Seconds between two looks at the engine."""
WARNING = 60.0
"""Seconds of a step after which the log tells of it; or a third of its limit, if that is less."""
SPARE = 15.0
"""Seconds that faulthandler's timer waits beyond the limit."""
STDERR = 2
log = logging.getLogger("peagle.engine")


class Watchdog:
    """A thread that looks at an engine once a second, from `start` on.

    A step that takes long is told once, with the stacks of all threads; one that takes longer than
    the engine's limit is told again, and `give_up` is called. A pause of the whole process is no
    step's time. tell: called at every look.

    kills: whether faulthandler's timer stands behind it. It needs no interpreter: where this thread
    gets no turn, since a call in C keeps the interpreter, it writes the stacks and ends the process
    with code 1. It also counts pauses of the process.
    """

    def __init__(
        self,
        core: Engine,
        give_up: Callable[[], object],
        tell: Callable[[], object] = lambda: None,
        kills: bool = False,
    ) -> None:
        self._core, self._limit = core, core.facts.step_timeout
        self._give_up, self._tell = give_up, tell
        self._kills = kills and self._limit < threading.TIMEOUT_MAX
        self._began: float | None = None
        """When the step that was seen last began."""
        self._age = 0.0
        self._warned = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="peagle-watchdog", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._stopped.wait(TICK):
            now = time.monotonic()
            self._look(min(now - last, 2 * TICK))
            last = now
            if self._kills:
                faulthandler.dump_traceback_later(self._limit + SPARE, exit=True, file=STDERR)
            self._tell()

    def _look(self, passed: float) -> None:
        began = self._core.began
        if began is None or began != self._began:
            self._began, self._age, self._warned = began, 0.0, False
            return
        self._age += passed
        if not self._warned and self._age > min(WARNING, self._limit / 3):
            self._warned = True
            self._report("a step takes long")
        if self._age > self._limit:
            self._report(f"a step took longer than --step-timeout {self._limit:g}; the engine ends")
            self._stopped.set()
            self._give_up()

    def _report(self, what: str) -> None:
        log.error(f"{what}: {self._core.newest.description}, since {self._age:.0f} s; the stacks:")
        faulthandler.dump_traceback(STDERR, all_threads=True)

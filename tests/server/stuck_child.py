"""An engine's process in which prompts that begin with a certain token keep the interpreter."""

import ctypes
import sys
from typing import Any

from peagle.engine.host.worker import HostWorker
from peagle.engine.step import Outcome, Step
from peagle.engine_client.child import main

HOUR = 3600
STUCK = 3
"""The token."""


def exchange(worker: HostWorker, step: Step, usual: Any = HostWorker.exchange) -> Outcome:
    if any(begin.tokens[0] == STUCK for begin in step.begun):
        ctypes.PyDLL(None).sleep(HOUR)
    return usual(worker, step)


if __name__ == "__main__":
    HostWorker.exchange = exchange  # type: ignore[method-assign]
    sys.exit(main())

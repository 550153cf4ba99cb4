"""Ctrl-C: at once during an import or while another thread loads, else as Python handles it."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
IMPORTING = "<frozen importlib._bootstrap>"
"""Where Python's own code of an import comes from."""


def install() -> None:
    """Handle Ctrl-C from now on; a shell's background job goes on to ignore it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


@contextmanager
def at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once within the block, and be Python's own after it.

    For what cannot be stopped and leaves nothing to clean up. `asyncio.run` needs Python's own.
    """
    handled = signal.getsignal(signal.SIGINT) in (_interrupt, signal.default_int_handler)
    if handled:
        signal.signal(signal.SIGINT, _end)
    try:
        yield
    finally:
        if handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End at once during an import: libraries catch an exception there, or cannot go on."""
    inner = frame
    while inner is not None:
        if inner.f_code.co_filename == IMPORTING:
            _end(number, frame)
        inner = inner.f_back
    raise KeyboardInterrupt


def _end(_: int, __: FrameType | None) -> None:
    os.write(2, b"peagle: interrupted\n")
    os._exit(INTERRUPTED)

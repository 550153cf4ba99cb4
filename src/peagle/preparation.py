"""Threads on which requests are made ready, apart from event loops: few for what is large."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from peagle.sandbox import LEFT

T = TypeVar("T")
Kind = Literal["small", "large", "form"]
LARGE = 1 << 16
"""Bytes of a body, or characters of a prompt, above which it is large."""
THREADS: dict[Kind, int] = {"small": 4, "large": 2, "form": 2}
SIZE: contextvars.ContextVar[int] = contextvars.ContextVar("SIZE", default=0)
"""Bytes of the body of the request that is served in this context."""


def kind_of(size: int) -> Kind:
    """Where work on so many bytes or characters belongs."""
    return "large" if size > LARGE else "small"


class Preparation:
    """What is small waits neither for what is large nor for forms, which are compiled."""

    def __init__(self) -> None:
        self._pools = {
            kind: ThreadPoolExecutor(count, f"peagle-{kind}") for kind, count in THREADS.items()
        }

    async def run(self, kind: Kind, work: Callable[..., T], *given: Any) -> T:
        """What some work returns or raises. Where nobody waits any more it does not begin, or knows
        by `LEFT`."""
        context, left = contextvars.copy_context(), threading.Event()
        context.run(LEFT.set, left)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pools[kind], context.run, work, *given)
        finally:
            left.set()

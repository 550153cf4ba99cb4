"""A cycle and prompt chunks in one pass of the target, which reads its weights once for both.

    apart     draft | target over R (K + 1) rows | accept, captured    target over P rows
    together  draft | target over R (K + 1) + P rows | accept

There are too many pairs of R and P to capture, so what is done together is launched kernel by
kernel. That is faster where a pass takes the device longer than the host takes to launch it: with
a large model, and with many requests. Both ways are timed before the first request comes.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from peagle.drafters.resident import CycleShape
from peagle.engine.device.cycle import PromptEnds
from peagle.engine.device.graphs import CycleGraphs
from peagle.engine.device.prefill import Prefill
from peagle.engine.step import Chunk, Step

REQUESTS = (8, 32, 128)
"""Numbers of requests that are timed."""
PROMPT = 256
"""Tokens of the prompt beside them, at most."""
TIMINGS = 5
GAIN = 1.05
"""How much faster the joined pass must be: the host has other work besides."""


@dataclass(frozen=True)
class Trial:
    """The prompt that is timed."""

    row: int
    """Of the request table, that belongs to no request."""
    tokens: tuple[int, ...]
    """Different ones: these decide on experts."""
    followed: bool
    """Whether there is a drafter."""


class JoinedPasses:
    """Runs cycles together with prompts, from a number of requests on."""

    def __init__(self, graphs: CycleGraphs, prefill: Prefill, trial: Trial, most_rows: int) -> None:
        """most_rows: of a pass for which memory was left beside the cache."""
        self._graphs, self._prefill, self._trial = graphs, prefill, trial
        self.most_rows = most_rows
        """Of a pass. Cycles do not count among the rows of a step, which may be more, therefore."""
        self.least_requests: int | None = None
        """From how many requests on it is faster; None: never."""

    def measure(self) -> None:
        """Time both ways, on rows that no request has yet."""
        prompt, drafts = len(self._trial.tokens), self._graphs.lengths[-1]
        sizes = [size for size in REQUESTS if size <= self._graphs.sizes[-1]]
        for size in reversed(sizes):
            if self._graphs.target_rows(size, drafts) + prompt > self.most_rows:
                continue
            if not self._gains(size):
                return
            self.least_requests = size

    def serve(self, step: Step, drafts: int) -> bool:
        """Whether a step's cycle of so many drafts and its chunks are faster together, and may be.

        Not where the host takes part, and not where a cycle is repeated.
        """
        least = self.least_requests
        if least is None or len(step.cycles) < least or not step.chunks or step.repeats > 1:
            return False
        if step.hosted or any(chunk.scored for chunk in step.chunks):
            return False
        return self._rows(len(step.cycles), drafts, step.chunks) <= self.most_rows

    def found_too_large(self, step: Step, drafts: int) -> None:
        """Let cycles and chunks as large stay apart from now on: a try costs time each time."""
        self.most_rows = self._rows(len(step.cycles), drafts, step.chunks) - 1

    def run(
        self, rows: Sequence[int], shape: CycleShape, chunks: Sequence[Chunk], followed: bool
    ) -> PromptEnds:
        """One cycle and some chunks, in the order of `in_order`; followed: as of `PromptPass`."""
        own = self._graphs.target_rows(len(rows), shape.drafts)
        return self._graphs.run_beside(rows, shape, self._prefill.laid_out(chunks, followed, own))

    def _rows(self, requests: int, drafts: int, chunks: Sequence[Chunk]) -> int:
        return self._graphs.target_rows(requests, drafts) + sum(chunk.rows for chunk in chunks)

    def _gains(self, size: int) -> bool:
        trial = self._trial
        chunks = [Chunk(trial.row, 0, trial.tokens, trial.tokens[-1], completes=True)]

        def together() -> None:
            self.run(rows, shape, chunks, trial.followed)

        def apart() -> None:
            self._graphs.run(rows, shape)
            self._prefill.run(chunks, trial.followed)

        try:
            rows, shape = self._graphs.steady_run(size)
            joined = _seconds(together)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return False
        rows, shape = self._graphs.steady_run(size)
        return joined * GAIN < _seconds(apart)


def _seconds(call: Callable[[], Any]) -> float:
    """The median of some calls, by a clock that the host's part counts for as well."""
    times = []
    for _ in range(TIMINGS + 1):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])

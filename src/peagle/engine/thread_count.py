"""How many CPU threads compute a step, while other programs want the same cores."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

LOOK = 3
"""Steps that try another number of threads."""
REPAID = 128
"""Seconds without a look for each second by which one took too long."""
GAIN = 0.9
"""Fewer threads are taken where they need less than this share of the time; more where they need
less time at all."""
GROWTH = 8
"""A look at more threads adds one for so many that there are; one at fewer halves them."""
RECENT, USUAL = 1 / 4, 1 / 32
"""Weights of the newest step in moving averages: of the pace, and of the time for its size."""


class ThreadCount:
    """The number of threads that is fastest now: `most`, or fewer while others want the cores.

    All threads of a product wait for the slowest, and a step has hundreds of products: beside one
    busy program, two threads on two cores can take ten times as long as one.
    """

    def __init__(self, most: int) -> None:
        self.now = most
        """Threads of the next step."""
        self._most = self._best = most
        self._grows = False
        """Whether the next look is at more threads, where there can be more."""
        self._usual: dict[int, float] = {}
        """Seconds of a step, by the bits of its number of target rows."""
        self._pace = 1.0
        """How long late steps took with the best number of threads, as a share of what is usual."""
        self._look: list[float] = []
        """The same share of each step of this look."""
        self._looked = 0.0
        """Seconds of this look."""
        self._until_look = 0.0
        """Seconds of steps that go before the next look."""

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Run a step's products on `now` threads, and learn from its time. rows: of the target."""
        torch.set_num_threads(self.now)
        started = time.perf_counter()
        try:
            yield
        finally:
            self.took(rows, time.perf_counter() - started)
            torch.set_num_threads(self._most)

    def took(self, rows: int, seconds: float) -> None:
        """Learn how long a step with `now` threads took; the first of a size tells nothing yet."""
        size, looks = rows.bit_length(), self.now != self._best
        if size not in self._usual:
            self._usual[size] = seconds
            return
        share = seconds / self._usual[size]
        self._usual[size] *= 1 + (share - 1) * USUAL
        if looks:
            self._look.append(share)
            self._looked += seconds
            self._judge()
            return
        self._pace += (share - self._pace) * RECENT
        self._until_look -= seconds
        if self._until_look <= 0.0:
            self.now = self._candidate()

    def _candidate(self) -> int:
        """Another number of threads that may be faster; the same where there is none."""
        if self._best < self._most and (self._grows or self._best == 1):
            return min(self._best + max(self._best // GROWTH, 1), self._most)
        return max(self._best // 2, 1)

    def _judge(self) -> None:
        """End a look as soon as it is lost, or over."""
        more, steps, shares = self.now > self._best, len(self._look), sum(self._look)
        bar = self._pace * (1.0 if more else GAIN)
        lost = shares >= bar * LOOK
        if not lost and steps < LOOK:
            return
        if lost:
            self._until_look = REPAID * self._looked * (1.0 - bar * steps / shares)
        else:
            self._best, self._pace = self.now, shares / steps
        self._grows = more != lost
        self.now, self._look, self._looked = self._best, [], 0.0


def thread_count(device: torch.device) -> ThreadCount | None:
    """That of an engine: None on a GPU, and where somebody has named the number of threads."""
    if device.type != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return None
    return ThreadCount(torch.get_num_threads())

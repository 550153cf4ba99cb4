"""The cycle captured by batch size and draft length, so that the host launches it in one call."""

import bisect
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from peagle.drafters.resident import Breadth
from peagle.engine.resident_cycle import ResidentCycle
from peagle.engine.upload import upload
from peagle.ops.resident import Resident
from peagle.ops.sampling import Sampling

Run = Callable[[], None]
TIMED = 15
"""Cycles that a time is the median of, where tiles are chosen by it."""
GLANCED = 5
"""The same, where draft lengths are."""
PRIME = 7919
"""From the token of an idle row to the next one's."""


def batch_sizes(most: int) -> list[int]:
    """Sizes that are captured: close together where a cycle's cost grows with each request."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


class CycleGraphs:
    """Runs the cycle for any rows of the request table; on a CPU without a graph.

    A batch is filled up to the next size with `spare`, a row that belongs to no request. Requests
    that come from a longer cycle than the next one run it uncaptured, once.
    """

    def __init__(
        self,
        cycle: ResidentCycle,
        state: Resident,
        sampling: Sampling,
        spare: int,
        lengths: Sequence[int],
    ) -> None:
        """lengths: of drafts, ascending."""
        self._cycle, self._state, self._sampling = cycle, state, sampling
        self._spare, self.lengths = spare, tuple(lengths)
        self.sizes = batch_sizes(len(state.limits) - 1)
        device = state.computed.device
        self._requests = {
            size: torch.full((size,), spare, dtype=torch.int64, device=device)
            for size in self.sizes
        }
        self._named: dict[int, list[int]] = {}
        self._captured: dict[tuple[int, int], Run] = {}
        """By size and drafts."""
        self.pool: Any = None
        """Of the graphs' memory, which one after another may use."""

    def capture(self) -> None:
        """Capture every size and length."""
        for size in reversed(self.sizes):
            for drafts in reversed(self.lengths):
                self._prepared(size, drafts)

    def run_for_nobody(self, size: int) -> None:
        """One cycle of full length that is not captured, whose requests are all spare."""
        self._fill(size, [self._spare] * size)
        self._once(size, _after_its_like(self.lengths[-1]))

    def seconds(self, size: int) -> float:
        """What such a cycle takes captured, for rows that no request has yet."""
        run = partial(self._once, size, _after_its_like(self.lengths[-1]))
        try:
            graph = captured(run, self._state.computed.device, None)
            return self._timed(graph.replay, size, TIMED)
        finally:
            torch.cuda.empty_cache()  # what the graph took, which does not come back by itself

    def seconds_by_length(self) -> dict[int, dict[int, float]]:
        """What captured cycles take for rows that no request has yet, by size and length."""
        return {
            size: {d: self._timed(self._prepared(size, d), size, GLANCED) for d in self.lengths}
            for size in self.sizes
        }

    def length_for(self, wanted: int) -> int:
        """The length of a cycle in which somebody wants so many drafts."""
        return self.lengths[bisect.bisect_left(self.lengths, wanted)]

    def run(self, rows: Sequence[int], breadth: Breadth) -> bool:
        """One cycle for some rows of the request table; whether it was a captured one."""
        size = self.sizes[bisect.bisect_left(self.sizes, len(rows))]
        named = [*rows, *[self._spare] * (size - len(rows))]
        fits = breadth.pending <= _after_its_like(breadth.drafts).pending
        once = partial(self._once, size, breadth)
        run: Run = self._prepared(size, breadth.drafts) if fits else once
        if self._named.get(size) != named:
            self._fill(size, named)
        run()
        return fits

    def _timed(self, replay: Run, size: int, count: int) -> float:
        """The median for idle rows, with tokens of their own: experts are chosen by these."""
        idle = [row for row in range(size + 1) if row != self._spare][:size]
        self._fill(size, idle)
        tokens = self._requests[size] * PRIME % self._cycle.target.config.vocab_size
        self._state.emitted[self._requests[size], 0] = tokens
        self._state.computed[self._requests[size]] = 1
        self._state.pending[self._requests[size]] = 1
        return statistics.median(_seconds(replay) for _ in range(count))

    def _prepared(self, size: int, drafts: int) -> Run:
        if (size, drafts) not in self._captured:
            self._captured[size, drafts] = self._capture(size, drafts)
        return self._captured[size, drafts]

    def _capture(self, size: int, drafts: int) -> Run:
        run = partial(self._once, size, _after_its_like(drafts))
        if not self._requests[size].is_cuda:
            return run
        self._fill(size, [self._spare] * size)
        graph = captured(run, self._state.computed.device, self.pool)
        self.pool = self.pool or graph.pool()
        return graph.replay

    def _once(self, size: int, breadth: Breadth) -> None:
        self._cycle.run(self._state, self._requests[size], breadth, self._sampling)

    def _fill(self, size: int, rows: list[int]) -> None:
        self._requests[size].copy_(upload(rows, self._requests[size].device))
        self._named[size] = rows


def captured(run: Run, device: torch.device, pool: Any) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches, with its memory from a pool; None: one of its own."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            run()  # compiles kernels and makes their workspaces outside the graph's memory
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        run()
    return graph


def _after_its_like(drafts: int) -> Breadth:
    """Of a cycle behind one of the same length, or a shorter one."""
    return Breadth(drafts, drafts + 1)


def _seconds(replay: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3

"""The cycle captured once a batch size, so that the host launches it in one call."""

import bisect
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from peagle.engine.resident_cycle import ResidentCycle, SamplingTable
from peagle.engine.upload import upload
from peagle.ops.resident import Resident

Run = Callable[[], None]
TIMED = 15
"""Cycles that a time is the median of."""


def batch_sizes(most: int) -> list[int]:
    """Sizes that are captured: close together where a cycle's cost grows with each request."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


class CycleGraphs:
    """Runs the cycle for any rows of the request table; on a CPU without a graph.

    A batch is filled up to the next size with `spare`, a row that belongs to no request.
    """

    def __init__(
        self, cycle: ResidentCycle, state: Resident, sampling: SamplingTable, spare: int, most: int
    ) -> None:
        self._cycle, self._state, self._sampling = cycle, state, sampling
        self._spare, self.sizes = spare, batch_sizes(most)
        device = state.computed.device
        self._requests = {
            size: torch.full((size,), spare, dtype=torch.int64, device=device)
            for size in self.sizes
        }
        self._named: dict[int, list[int]] = {}
        self._captured: dict[tuple[int, bool], Run] = {}
        self._pool: Any = None

    def capture(self) -> None:
        """Capture every size for greedy requests; sampled ones are captured when first met."""
        for size in reversed(self.sizes):
            self._prepared(size, False)

    def run_for_nobody(self, size: int) -> None:
        """One cycle that is not captured, whose requests are all spare."""
        self._empty(size)
        self._once(size, False)

    def seconds(self, size: int) -> float:
        """What such a cycle takes captured: the median of several."""
        self._empty(size)
        try:
            return self._median(partial(self._once, size, False))
        finally:
            torch.cuda.empty_cache()  # what the graph took, which does not come back by itself

    def _median(self, run: Run) -> float:
        graph = self._graph(run, None)
        return statistics.median(_timed(graph.replay) for _ in range(TIMED))

    def run(self, rows: Sequence[int], sampled: bool) -> None:
        """One cycle for some rows of the request table."""
        size = self.sizes[bisect.bisect_left(self.sizes, len(rows))]
        named = [*rows, *[self._spare] * (size - len(rows))]
        run = self._prepared(size, sampled)
        if self._named.get(size) != named:
            self._requests[size].copy_(upload(named, self._requests[size].device))
            self._named[size] = named
        run()

    def _prepared(self, size: int, sampled: bool) -> Run:
        key = (size, sampled)
        if key not in self._captured:
            self._captured[key] = self._capture(size, sampled)
        return self._captured[key]

    def _capture(self, size: int, sampled: bool) -> Run:
        run = partial(self._once, size, sampled)
        if not self._requests[size].is_cuda:
            return run
        self._empty(size)
        graph = self._graph(run, self._pool)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def _once(self, size: int, sampled: bool) -> None:
        sampling = self._sampling if sampled else None
        self._cycle.run(self._state, self._requests[size], sampling)

    def _empty(self, size: int) -> None:
        self._requests[size].fill_(self._spare)
        self._named.pop(size, None)

    def _graph(self, run: Run, pool: Any) -> torch.cuda.CUDAGraph:
        device = self._state.computed.device
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


def _timed(replay: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3

"""The cycle captured by batch size and draft length, so that the host launches it in one call."""

import bisect
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from peagle.drafters.resident import Breadth
from peagle.engine.resident_cycle import ResidentCycle, SamplingTable
from peagle.engine.upload import upload
from peagle.ops.resident import Resident

Run = Callable[[], None]
TIMED = 15
"""Cycles that a time is the median of, where tiles are chosen by it."""
GLANCED = 5
"""The same, where draft lengths are."""


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
        sampling: SamplingTable,
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
        self._captured: dict[tuple[int, Breadth, bool], Run] = {}
        self._pool: Any = None

    def capture(self) -> None:
        """Capture every size for greedy requests; sampled ones are captured when first met."""
        for size in reversed(self.sizes):
            for drafts in reversed(self.lengths):
                self._prepared(size, _after_its_like(drafts), False)

    def run_for_nobody(self, size: int) -> None:
        """One cycle of full length that is not captured, whose requests are all spare."""
        self._fill(size, [self._spare] * size)
        self._once(size, _after_its_like(self.lengths[-1]), False)

    def seconds(self, size: int) -> float:
        """What such a cycle takes captured, for rows that no request has yet."""
        self._fill(size, self._idle(size))
        try:
            run = partial(self._once, size, _after_its_like(self.lengths[-1]), False)
            return _median(self._graph(run, None).replay, TIMED)
        finally:
            torch.cuda.empty_cache()  # what the graph took, which does not come back by itself

    def seconds_by_length(self) -> dict[int, dict[int, float]]:
        """What the captured cycles take for rows that no request has yet, by size and length."""
        found: dict[int, dict[int, float]] = {}
        for size in self.sizes:
            self._fill(size, self._idle(size))
            cycles = {d: self._prepared(size, _after_its_like(d), False) for d in self.lengths}
            found[size] = {drafts: _median(run, GLANCED) for drafts, run in cycles.items()}
        return found

    def drafts(self, wanted: int) -> int:
        """The length of a cycle in which somebody wants so many drafts."""
        return self.lengths[bisect.bisect_left(self.lengths, wanted)]

    def run(self, rows: Sequence[int], breadth: Breadth, sampled: bool) -> None:
        """One cycle for some rows of the request table."""
        size = self.sizes[bisect.bisect_left(self.sizes, len(rows))]
        named = [*rows, *[self._spare] * (size - len(rows))]
        run = self._prepared(size, breadth, sampled)
        if self._named.get(size) != named:
            self._fill(size, named)
        run()

    def _prepared(self, size: int, breadth: Breadth, sampled: bool) -> Run:
        usual = _after_its_like(breadth.drafts)
        if breadth.pending > usual.pending:
            return partial(self._once, size, breadth, sampled)
        key = (size, usual, sampled)
        if key not in self._captured:
            self._captured[key] = self._capture(size, usual, sampled)
        return self._captured[key]

    def _capture(self, size: int, breadth: Breadth, sampled: bool) -> Run:
        run = partial(self._once, size, breadth, sampled)
        if not self._requests[size].is_cuda:
            return run
        self._fill(size, [self._spare] * size)
        graph = self._graph(run, self._pool)
        self._pool = self._pool or graph.pool()
        return graph.replay

    def _once(self, size: int, breadth: Breadth, sampled: bool) -> None:
        sampling = self._sampling if sampled else None
        self._cycle.run(self._state, self._requests[size], breadth, sampling)

    def _fill(self, size: int, rows: list[int]) -> None:
        self._requests[size].copy_(upload(rows, self._requests[size].device))
        self._named[size] = rows

    def _idle(self, size: int) -> list[int]:
        """So many rows of the request table but the spare one."""
        return [row for row in range(size + 1) if row != self._spare][:size]

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


def _after_its_like(drafts: int) -> Breadth:
    """Of a cycle behind one of the same length, or a shorter one."""
    return Breadth(drafts, drafts + 1)


def _median(replay: Run, count: int) -> float:
    return statistics.median(_timed(replay) for _ in range(count))


def _timed(replay: Run) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3

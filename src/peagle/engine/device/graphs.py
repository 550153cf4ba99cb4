"""The cycle, captured by batch size and draft length, so that the host launches it in one call."""

import bisect
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from peagle.drafters.resident import CycleShape
from peagle.engine.device.cycle import DeviceCycle, Verified
from peagle.engine.device.tree_cycle import TreeCycle
from peagle.engine.draft_temperatures import FACTORS, DraftTemperatures
from peagle.ops.drafts import Drafts
from peagle.ops.resident import ResidentState
from peagle.ops.sampling import Sampling
from peagle.transfer import upload

Replay = Callable[[], None]
T = TypeVar("T")
TILE_TIMINGS = 15
"""Cycles in the median by which tiles are chosen."""
LENGTH_TIMINGS = 5
"""Cycles in the median by which draft lengths are."""
MOST_TREE_COST = 1.15
"""How much longer a cycle with trees may take: they give 16 to 31 % more tokens."""
TREE_CONTEXT = 4096
"""Positions of a long context, in which trees must cost as little."""
TREE_TRIALS = 3
"""How often they are timed before they are held to take longer: times may be disturbed."""
TOKEN_STRIDE = 7919
"""Between the tokens of idle rows; a prime."""


def batch_sizes(most: int) -> list[int]:
    """Batch sizes to capture: denser where a cycle's cost grows with each request."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, most + 32, 32)]
    return [*(size for size in sizes if size < most), most]


class CycleGraphs:
    """Runs the cycle for any rows of the request table; on a CPU without a graph.

    A batch is padded to the next size with `spare`, a row that belongs to no request. When draft
    lengths shrink, the first shorter cycle is not captured: more positions are pending than usual.
    """

    def __init__(
        self,
        cycle: DeviceCycle,
        state: ResidentState,
        sampling: Sampling,
        spare: int,
        lengths: Sequence[int],
        trees: TreeCycle | None = None,
    ) -> None:
        """lengths: draft lengths, ascending; trees: what may take the place of the longest."""
        self._cycle, self._state, self._sampling = cycle, state, sampling
        self._spare, self.lengths = spare, tuple(lengths)
        self._trees = trees
        self.sizes = batch_sizes(len(state.limits) - 1)
        self.most_trees = 0 if trees is None else self.sizes[-1]
        """Requests up to which drafts branch."""
        device = state.computed.device
        self._temperatures = DraftTemperatures(self.lengths[-1], device)
        self._requests = {
            size: torch.full((size,), spare, dtype=torch.int64, device=device)
            for size in self.sizes
        }
        self._filled: dict[int, list[int]] = {}
        self._captured: dict[tuple[str, int, int], Callable[[], Any]] = {}
        """By part of the cycle, size and drafts."""
        self.pool: Any = None
        """Memory that all graphs share, since they run one after another."""

    def capture(self) -> None:
        """Capture every size and length."""
        for size in reversed(self.sizes):
            for drafts in reversed(self.lengths):
                self._prepared(self._once, size, drafts)

    def dummy_run(self, size: int) -> None:
        """One uncaptured cycle of full length whose requests are all spare."""
        self._fill(size, [self._spare] * size)
        self._once(size, _steady(self.lengths[-1]))

    def seconds(self, size: int) -> float:
        """Seconds of such a cycle when captured, on rows that no request has yet."""
        run = functools.partial(self._once, size, _steady(self.lengths[-1]))
        try:
            graph, _ = captured(run, self._state.computed.device, None)
            return self._timed(graph.replay, size, TILE_TIMINGS)
        finally:
            torch.cuda.empty_cache()  # the graph's memory does not come back by itself

    def seconds_by_length(self) -> dict[int, dict[int, float]]:
        """Seconds of captured cycles on rows that no request has yet, by size and length; with
        trees where drafts branch."""
        return {size: {d: self._seconds_of(size, d) for d in self.lengths} for size in self.sizes}

    def length_for(self, wanted: int) -> int:
        """The shortest captured length of at least `wanted` drafts."""
        return self.lengths[bisect.bisect_left(self.lengths, wanted)]

    def branches(self, requests: int, drafts: int) -> bool:
        """Whether so many drafts of each of so many requests, padded or not, branch."""
        return drafts == self.lengths[-1] and requests <= self.most_trees

    def measure_trees(self) -> None:
        """Let drafts branch up to the number of requests where it costs little, in long contexts as
        well, and where there is memory for it."""
        self.most_trees = 0
        longest = min(TREE_CONTEXT, self._state.slots.shape[1] // 2)
        for size in self.sizes if self._trees is not None else ():
            try:
                if not all(self._trees_cost_little(size, context) for context in (1, longest)):
                    return
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                return
            self.most_trees = size

    def _trees_cost_little(self, size: int, context: int) -> bool:
        """Whether a cycle with trees takes hardly longer than one without."""
        graphs = [self._prepared(p, size, self.lengths[-1]) for p in (self._once, self._tree)]
        for _ in range(TREE_TRIALS):
            chain, tree = (self._timed(graph, size, TILE_TIMINGS, context) for graph in graphs)
            if tree <= MOST_TREE_COST * chain:
                return True
        return False

    def run(self, rows: Sequence[int], shape: CycleShape, branched: bool) -> bool:
        """One cycle for some rows of the request table; whether it was captured.

        branched: whether drafts are to branch, as they can.
        """
        self._run(self._tree if branched else self._once, rows, shape)
        return _fits(shape)

    def draft(self, rows: Sequence[int], shape: CycleShape) -> Tensor:
        """A cycle's drafts [rows and padding, drafts]; `verify` and `accept` go on from there.

        These parts are captured when they are first asked for: most engines need few sizes of them,
        or none.
        """
        if not shape.drafts and self._cycle.texts is None:
            return self._kept.tokens[:0]
        return self._run(self._draft, rows, shape).tokens

    def verify(self, rows: Sequence[int], drafts: int) -> Verified:
        """What the target makes of the drafts, which have just been made for the same rows.

        All of it stays until the next cycle or prompt runs.
        """
        return self._run(self._verify, rows, _steady(drafts))

    def accept(self, rows: Sequence[int], verified: Verified) -> None:
        """Choose tokens by logits that may have been edited, and accept the drafts that agree."""
        requests = self._pad(rows)
        self._cycle.accept(self._state, requests, verified, self._sampling, self._temperatures)

    def _whole(self, size: int, drafts: int) -> Callable[[int, CycleShape], None]:
        """A cycle from drafts to acceptance."""
        return self._tree if self.branches(size, drafts) else self._once

    def _seconds_of(self, size: int, drafts: int) -> float:
        run = self._prepared(self._whole(size, drafts), size, drafts)
        return self._timed(run, size, LENGTH_TIMINGS)

    def _timed(self, replay: Replay, size: int, count: int, context: int = 1) -> float:
        """The median over idle rows. context: their positions, all of which hold the same keys."""
        self._make_ready(size)
        state, rows = self._state, self._requests[size]
        if context > 1:
            state.computed[rows], state.limits[rows] = context, state.slots.shape[1]
        found = statistics.median(_seconds(replay) for _ in range(count))
        if context > 1:
            state.limits[rows] = 0
            self._cycle.forget_null_slots()
        return found

    def _make_ready(self, size: int) -> None:
        """Give idle rows tokens, which are different: these decide on experts."""
        idle = [row for row in range(size + 1) if row != self._spare][:size]
        self._fill(size, idle)
        tokens = self._requests[size] * TOKEN_STRIDE % self._cycle.target.spec.vocab_size
        self._state.emitted[self._requests[size], 0] = tokens
        self._state.computed[self._requests[size]] = 1
        self._state.pending[self._requests[size]] = 1

    def _run(
        self, part: Callable[[int, CycleShape], T], rows: Sequence[int], shape: CycleShape
    ) -> T:
        """A part of the cycle, captured if that fits; rows come after a capture, which pads."""
        size = self._size_for(len(rows))
        once = functools.partial(part, size, shape)
        run = self._prepared(part, size, shape.drafts) if _fits(shape) else once
        self._pad(rows)
        return run()

    def _prepared(
        self, part: Callable[[int, CycleShape], T], size: int, drafts: int
    ) -> Callable[[], T]:
        """A part of the cycle, captured when it is first asked for."""
        key = part.__name__, size, drafts
        if key not in self._captured:
            run = functools.partial(part, size, _steady(drafts))
            self._captured[key] = self._capture(run, size)
        return self._captured[key]

    def _capture(self, run: Callable[[], T], size: int) -> Callable[[], T]:
        if not self._requests[size].is_cuda:
            return run
        self._fill(size, [self._spare] * size)
        graph, found = captured(run, self._state.computed.device, self.pool)
        self.pool = self.pool or graph.pool()

        def replay() -> T:
            graph.replay()
            return found

        return replay

    def _draft(self, size: int, shape: CycleShape) -> Drafts:
        state, requests = self._state, self._requests[size]
        race = self._temperatures.race(self._sampling, state.computed, requests)
        drafts = self._cycle.draft(state, race, shape).drafts
        kept = self._drafts(size, shape.drafts)
        kept.tokens.copy_(drafts.tokens)
        if kept.alternatives is not None and drafts.alternatives is not None:
            kept.alternatives.copy_(drafts.alternatives)
        return kept

    def _verify(self, size: int, shape: CycleShape) -> Verified:
        drafts = self._drafts(size, shape.drafts)
        verified = self._cycle.verify(self._state, self._requests[size], drafts)
        kept = self._logits[: len(verified.logits)].copy_(verified.logits)
        return replace(verified, logits=kept)

    def _drafts(self, size: int, drafts: int) -> Drafts:
        """What `draft` makes, where `verify` and `accept` find it."""
        tokens, others = self._kept.tokens[: size * drafts], self._kept.alternatives
        if others is not None:
            others = others[: size * drafts].view(size, drafts, len(FACTORS))
        return Drafts(tokens.view(size, drafts), others)

    @functools.cached_property
    def _kept(self) -> Drafts:
        tokens = self._requests[self.sizes[-1]].new_zeros(self.sizes[-1] * self.lengths[-1])
        if self._cycle.drafter is None:
            return Drafts(tokens)
        return Drafts(tokens, tokens.new_zeros(len(tokens), len(FACTORS)))

    @functools.cached_property
    def _logits(self) -> Tensor:
        """What `verify` returns: one place for all sizes, whose graphs would keep one each."""
        target = self._cycle.target
        rows = self.sizes[-1] * (self.lengths[-1] + 1)
        return target.embed.weight.new_empty(rows, target.spec.vocab_size)

    def _once(self, size: int, shape: CycleShape) -> None:
        requests, temperatures = self._requests[size], self._temperatures
        self._cycle.run(self._state, requests, shape, self._sampling, temperatures)

    def _tree(self, size: int, shape: CycleShape) -> None:
        requests, temperatures = self._requests[size], self._temperatures
        assert self._trees is not None
        self._trees.run(self._state, requests, shape, self._sampling, temperatures)

    def _size_for(self, requests: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, requests)]

    def _pad(self, rows: Sequence[int]) -> Tensor:
        """Rows of the table on the device, padded: [size]."""
        size = self._size_for(len(rows))
        filled = [*rows, *[self._spare] * (size - len(rows))]
        if self._filled.get(size) != filled:
            self._fill(size, filled)
        return self._requests[size]

    def _fill(self, size: int, rows: list[int]) -> None:
        self._requests[size].copy_(upload(rows, self._requests[size].device))
        self._filled[size] = rows


def captured(
    run: Callable[[], T], device: torch.device, pool: Any
) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `run` launches, with its memory from `pool`, and what `run` returned in it.

    pool: None is one of its own.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            run()  # compiles kernels, and allocates their workspaces outside the graph's pool
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        found = run()
    return graph, found


def _steady(drafts: int) -> CycleShape:
    """A cycle after one of the same length, or a shorter one."""
    return CycleShape(drafts, drafts + 1)


def _fits(shape: CycleShape) -> bool:
    """Whether a captured cycle has room for what is pending, if it has drafts."""
    return not shape.drafts or shape.pending <= _steady(shape.drafts).pending


def _seconds(replay: Replay) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3

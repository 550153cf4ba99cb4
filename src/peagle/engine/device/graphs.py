"""The cycle, captured by batch size and draft length, so that the host launches it in one call."""

import bisect
import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from peagle.engine.branching import Branching
from peagle.engine.cycle import Verified, run_cycle
from peagle.engine.device.cycle import CycleShape, DeviceBatch, DeviceSide
from peagle.ops.draft import Draft
from peagle.transfer import upload

Replay = Callable[[], None]
T = TypeVar("T")
Part = Callable[[int, CycleShape], T]
"""A part of the cycle, by batch size."""
TREE_TIMINGS = 15
"""Cycles in the median by which trees are timed."""
LENGTH_TIMINGS = 5
"""Cycles in the median by which draft lengths are timed."""
MOST_TREE_COST = 1.15
"""How much longer a cycle with trees may take: they give 16 to 31 % more tokens."""
TREE_CONTEXT = 4096
"""Positions of a long context, in which trees must cost as little."""
TREE_TRIALS = 3
"""How often trees are timed before they count as too slow: other programs may disturb a timing."""
TOKEN_STRIDE = 7919
"""The distance between tokens of idle rows; a prime."""


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
        self, side: DeviceSide, spare: int, lengths: Sequence[int], num_tree_nodes: int = 0
    ) -> None:
        """lengths: draft lengths, ascending; num_tree_nodes: drafts that branch in place of the
        longest, 0 for none."""
        self._side, self._spare, self.lengths = side, spare, tuple(lengths)
        state = side.state
        self.sizes = batch_sizes(len(state.limits) - 1)
        self.branching = Branching(self.lengths[-1], num_tree_nodes, self.sizes[-1])
        device = state.computed.device
        self._requests = {
            size: torch.full((size,), spare, dtype=torch.int64, device=device)
            for size in self.sizes
        }
        self._filled: dict[int, list[int]] = {}
        self._captured: dict[tuple[str, int, int, int], Callable[[], Any]] = {}
        """The captured graphs, by part of the cycle, size, drafts and nodes."""
        self.pool: Any = None
        """Memory that all graphs share, since they run one after another."""

    def capture(self) -> None:
        """Capture every size and length."""
        # the largest first: the others find room in the memory that it leaves to the pool
        for size in reversed(self.sizes):
            for drafts in reversed(self.lengths):
                self._prepared(self._whole, size, _steady(drafts))

    def seconds_by_length(self) -> dict[int, dict[int, float]]:
        """Seconds of captured cycles on rows that no request has yet, by size and length; with
        trees where drafts branch."""
        return {size: {d: self._seconds_of(size, d) for d in self.lengths} for size in self.sizes}

    def length_for(self, wanted: int) -> int:
        """The shortest captured length of at least `wanted` drafts."""
        return self.lengths[bisect.bisect_left(self.lengths, wanted)]

    def measure_trees(self, least: int = 0) -> None:
        """Let drafts branch up to the number of requests where it costs little, in long contexts as
        well, and where there is memory for it.

        least: requests up to which they branch whatever it costs.
        """
        most, longest = 0, min(TREE_CONTEXT, self._side.state.slots.shape[1] // 2)
        for size in self.sizes if self.branching.nodes else ():
            try:
                cheap = all(self._trees_cost_little(size, context) for context in (1, longest))
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                break
            if not cheap and size > least:
                break
            most = size
        self.branching = replace(self.branching, most_requests=most)

    def _trees_cost_little(self, size: int, context: int) -> bool:
        """Whether a cycle with trees takes hardly longer than one without."""
        chain = _steady(self.lengths[-1])
        shapes = chain, replace(chain, nodes=self.branching.nodes)
        graphs = [self._prepared(self._whole, size, shape) for shape in shapes]
        for _ in range(TREE_TRIALS):
            of_chain, of_tree = (self._timed(g, size, TREE_TIMINGS, context) for g in graphs)
            if of_tree <= MOST_TREE_COST * of_chain:
                return True
        return False

    def run(self, rows: Sequence[int], shape: CycleShape) -> bool:
        """Run a cycle for some rows of the request table; returns whether it was captured."""
        self._run(self._whole, rows, shape)
        return _fits(shape)

    def draft(self, rows: Sequence[int], shape: CycleShape) -> Tensor:
        """A cycle's drafts [rows and padding, drafts]; `verify` and `accept` go on from there.

        These parts are captured when they are first asked for: most engines need few sizes of them,
        or none.
        """
        if not shape.drafts and self._side.history is None:
            return self._kept[:0]
        return self._run(self._draft, rows, shape)

    def verify(self, rows: Sequence[int], drafts: int) -> Verified:
        """What the target makes of the drafts, which have just been made for the same rows.

        All of it stays until the next cycle or prompt runs.
        """
        return self._run(self._verify, rows, _steady(drafts))

    def accept(self, rows: Sequence[int], drafts: int, verified: Verified) -> None:
        """Choose tokens by logits that may have been edited, and commit the drafts that agree."""
        self._pad(rows)
        size = self._size_for(len(rows))
        batch, draft = self._batch(size, _steady(drafts)), self._drafted(size, drafts)
        batch.commit(draft, batch.accept(draft, verified), verified)

    def _batch(self, size: int, shape: CycleShape) -> DeviceBatch:
        return DeviceBatch(self._side, self._requests[size], shape)

    def _seconds_of(self, size: int, drafts: int) -> float:
        shape = replace(_steady(drafts), nodes=self.branching.nodes_for(size, drafts))
        return self._timed(self._prepared(self._whole, size, shape), size, LENGTH_TIMINGS)

    def _timed(self, replay: Replay, size: int, count: int, context: int = 1) -> float:
        """The median time over idle rows. context: their positions, all of which hold the same
        keys."""
        self._make_ready(size)
        state, rows = self._side.state, self._requests[size]
        if context > 1:
            state.computed[rows], state.limits[rows] = context, state.slots.shape[1]
        found = statistics.median(_seconds(replay) for _ in range(count))
        if context > 1:
            state.limits[rows] = 0
            # idle rows have written where positions without a slot are read
            self._side.models.forget_null_slots()
        return found

    def _make_ready(self, size: int) -> None:
        """Give idle rows tokens, which are different: these decide on experts."""
        idle = [row for row in range(size + 1) if row != self._spare][:size]
        self._fill(size, idle)
        state, rows = self._side.state, self._requests[size]
        state.emitted[rows, 0] = rows * TOKEN_STRIDE % self._side.models.target.spec.vocab_size
        state.computed[rows] = 1
        state.pending[rows] = 1

    def _run(self, part: Part[T], rows: Sequence[int], shape: CycleShape) -> T:
        """Run a part of the cycle, captured if that fits; rows come after a capture, which pads."""
        size = self._size_for(len(rows))
        once = functools.partial(part, size, shape)
        # a graph has room for what a cycle of its length leaves; a longer one's rest is launched
        # plainly
        run = self._prepared(part, size, shape) if _fits(shape) else once
        self._pad(rows)
        return run()

    def _prepared(self, part: Part[T], size: int, shape: CycleShape) -> Callable[[], T]:
        """A part of the cycle, captured when it is first asked for."""
        key = part.__name__, size, shape.drafts, shape.nodes
        if key not in self._captured:
            steady = replace(_steady(shape.drafts), nodes=shape.nodes)
            self._captured[key] = self._capture(functools.partial(part, size, steady), size)
        return self._captured[key]

    def _capture(self, run: Callable[[], T], size: int) -> Callable[[], T]:
        if not self._requests[size].is_cuda:
            return run
        self._fill(size, [self._spare] * size)
        replay, self.pool = captured(run, self._side.state.computed.device, self.pool)
        return replay

    def _whole(self, size: int, shape: CycleShape) -> None:
        run_cycle(self._batch(size, shape))

    def _draft(self, size: int, shape: CycleShape) -> Tensor:
        tokens = self._drafted(size, shape.drafts).tokens
        return tokens.copy_(self._batch(size, shape).draft().ids).flatten()

    def _verify(self, size: int, shape: CycleShape) -> Verified:
        verified = self._batch(size, shape).verify(self._drafted(size, shape.drafts))
        kept = self._logits[: len(verified.logits)].copy_(verified.logits)
        return verified._replace(logits=kept)

    def _drafted(self, size: int, drafts: int) -> Draft:
        """What `draft` makes, where `verify` and `accept` find it."""
        return Draft(self._kept[: size * drafts].view(size, drafts))

    @functools.cached_property
    def _kept(self) -> Tensor:
        """The drafts that `draft` makes, one request's behind another's."""
        return self._requests[self.sizes[-1]].new_zeros(self.sizes[-1] * self.lengths[-1])

    @functools.cached_property
    def _logits(self) -> Tensor:
        """What `verify` returns: one place for all sizes, whose graphs would keep one each."""
        target = self._side.models.target
        rows = self.sizes[-1] * (self.lengths[-1] + 1)
        return target.embed.weight.new_empty(rows, target.spec.vocab_size)

    def _size_for(self, requests: int) -> int:
        return self.sizes[bisect.bisect_left(self.sizes, requests)]

    def _pad(self, rows: Sequence[int]) -> None:
        """Have rows of the table on the device, padded."""
        size = self._size_for(len(rows))
        filled = [*rows, *[self._spare] * (size - len(rows))]
        # the same requests come again in most steps: then nothing is copied
        if self._filled.get(size) != filled:
            self._fill(size, filled)

    def _fill(self, size: int, rows: list[int]) -> None:
        self._requests[size].copy_(upload(rows, self._requests[size].device))
        self._filled[size] = rows


def captured(run: Callable[[], T], device: torch.device, pool: Any) -> tuple[Callable[[], T], Any]:
    """What replays all that `run` launches, and returns what it returned; and the graph's pool.

    pool: where the graph's memory is from; None: one of its own.
    """
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            run()  # compiles kernels, and allocates their workspaces outside the graph's pool
    finally:
        torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # a graph replays addresses: what it reads and writes must stay where it is
    with torch.cuda.graph(graph, pool=pool):
        found = run()

    def replay() -> T:
        graph.replay()
        return found

    return replay, graph.pool()


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

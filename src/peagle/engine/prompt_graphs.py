"""Short prompts, captured by their number of rows: launched one by one, kernels wait for the host.

A pass is filled up to the next size with rows of `spare`, a table row that belongs to no request.
"""

import bisect
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from peagle.drafters.drafter import Span
from peagle.engine.batch import TILE, Scheduled, tiles_of
from peagle.engine.graph import captured
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import Attention, Ends, Prompts, ResidentCycle
from peagle.engine.upload import upload
from peagle.models.fused import AttendProduct
from peagle.ops.cached_attention import Heads, PassRows, attend, store

SIZES = (16, 64, 128, 256, 384, 512)
"""Rows that are captured. With more the GPU has more to do than the host."""
CHUNKS = 8
"""Most prompts in one pass."""
FURTHEST = 4096
"""Positions that rows may see: attention to more is quicker uncaptured."""


class PromptGraph:
    """The pass of one size, which reads all it is told from one tensor."""

    def __init__(self, cycle: ResidentCycle, table: RequestTable, spare: int, size: int) -> None:
        self._cycle, self._table, self._spare, self._size = cycle, table, spare, size
        self._told = upload(self._numbers(()), table.slots.device)
        self._replayed: tuple[torch.cuda.CUDAGraph, Ends] | None = None

    def capture(self, pool: Any) -> None:
        """With memory from a pool that nothing else uses while this runs."""
        passes: list[Ends] = []
        graph = captured(lambda: passes.append(self._pass()), self._told.device, pool)
        self._replayed = graph, passes[-1]

    def run(self, chunks: Sequence[Scheduled]) -> Ends:
        """The ends of those that complete; what is returned lasts until the next pass."""
        self._told.copy_(upload(self._numbers(chunks), self._told.device))
        if self._replayed is None:
            found = self._pass()
        else:
            graph, found = self._replayed
            graph.replay()
        count = sum(item.completes for item in chunks)
        features = None if found.features is None else found.features[:count]
        return Ends(found.logits[:count], features)

    def _numbers(self, chunks: Sequence[Scheduled]) -> list[int]:
        """For each row its token, the next one, its position and table row; for each of attention's
        tiles the table row, start and count; and the rows at which prompts end."""
        spans = spans_of(chunks)
        rest = self._size - sum(span.count for span in spans)
        spans += [Span(self._spare, 0, min(TILE, rest - i)) for i in range(0, rest, TILE)]
        idle = [0] * rest
        tokens = [token for item in chunks for token in item.request.tokens[item.start : item.stop]]
        following = [token for item in chunks for token in following_tokens(item)]
        positions = [span.start + offset for span in spans for offset in range(span.count)]
        owners = [span.row for span in spans for _ in range(span.count)]
        tiles = tiles_of(spans)
        tiles += [(self._spare, 0, 0)] * (self._tiles - len(tiles))
        ends = ends_of(chunks)
        ends += [0] * (CHUNKS - len(ends))
        of_rows = [*tokens, *idle, *following, *idle, *positions, *owners]
        return [*of_rows, *_flat(zip(*tiles, strict=True)), *ends]

    @property
    def _tiles(self) -> int:
        """Enough for a part of a tile at the end of each chunk."""
        return self._size // TILE + CHUNKS

    def _pass(self) -> Ends:
        parts = (4 * self._size, 3 * self._tiles, CHUNKS)
        of_rows, of_tiles, ends = self._told.split(parts)
        tokens, following, positions, owners = of_rows.view(4, -1)
        requests, starts, counts = of_tiles.view(3, -1)
        slots, limits = self._table.slots, self._table.limits
        rows = PassRows(
            slots=slots,
            limits=limits,
            requests=requests,
            starts=starts,
            firsts=counts.cumsum(0) - counts,
            counts=counts,
            positions=positions,
            writes=slots[owners, positions].where(positions < limits[owners], -1),
            most=TILE,
        )
        return self._cycle.fill(Prompts(tokens, following, ends), _attention(rows))


class PromptGraphs:
    """Passes of every size; on a CPU without graphs."""

    def __init__(
        self, cycle: ResidentCycle, table: RequestTable, spare: int, max_batched_tokens: int
    ) -> None:
        most = min(max_batched_tokens, table.slots.shape[1])
        self._sizes = [size for size in SIZES if size <= most]
        self._graphs = [PromptGraph(cycle, table, spare, size) for size in self._sizes]

    def capture(self, pool: Any) -> None:
        """Every size."""
        for graph in reversed(self._graphs):
            graph.capture(pool)

    def fit(self, chunks: Sequence[Scheduled]) -> PromptGraph | None:
        """The pass that takes these; None where they are too many or too long."""
        place = bisect.bisect_left(self._sizes, sum(item.rows for item in chunks))
        furthest = max(item.stop for item in chunks)
        if place == len(self._sizes) or len(chunks) > CHUNKS or furthest > FURTHEST:
            return None
        return self._graphs[place]


def spans_of(chunks: Sequence[Scheduled]) -> list[Span]:
    """Whose rows chunks are."""
    return [Span(item.request.row, item.start, item.rows) for item in chunks]


def following_tokens(item: Scheduled) -> list[int]:
    """The token behind each of a chunk's rows; where the prompt ends, its last one again."""
    tokens = item.request.tokens
    return [*tokens[item.start + 1 : item.stop + 1], *tokens[-1:]][: item.rows]


def ends_of(chunks: Sequence[Scheduled]) -> list[int]:
    """The rows that give chunks that complete their prompts the next token."""
    behind = itertools.accumulate(item.rows for item in chunks)
    return [stop - 1 for item, stop in zip(chunks, behind, strict=True) if item.completes]


def _attention(rows: PassRows) -> Attention:
    def over(cache: Tensor) -> AttendProduct:
        def attend_layer(layer: int, qkv: Tensor, heads: Heads) -> Tensor:
            query, _, _ = store(qkv, heads, cache[layer], rows.positions, rows.writes)
            return attend(query, heads, cache[layer], rows)

        return attend_layer

    return over


def _flat(columns: Iterable[Iterable[int]]) -> Iterable[int]:
    return itertools.chain.from_iterable(columns)

"""Prompt chunks through target and drafter, outside the captured cycle.

Passes over short prompts are captured by number of rows: launched one by one, their kernels wait
for the host. There each chunk is padded to whole tiles of attention, and the pass to the next size,
with rows of `spare`, a table row that belongs to no request. Padding writes no keys, and nothing
reads it. As many prompts can end in a pass as it has tiles.
"""

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from peagle.engine.capacity import PROMPT_SIZES
from peagle.engine.device.graphs import captured
from peagle.engine.device.models import Attention, DeviceModels, PromptEnds, PromptRows
from peagle.engine.device.prompt_attention import by_torch, prompt_attention, warm_up
from peagle.engine.kv_cache import KVCache
from peagle.engine.logprobs import scored_rows
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import TILE, Span, neighbours
from peagle.engine.step import PromptChunk
from peagle.models.fused import AttendProduct, FusedLayers
from peagle.ops.cached_attention import PassRows, store_attend
from peagle.ops.cycle_state import CycleState
from peagle.ops.delta_net import DeltaRows
from peagle.ops.moe import RoutedExperts
from peagle.ops.triton import on_hopper
from peagle.transfer import upload

MOST_PAIRS = 1 << 20
"""Most rows times positions that they may see: beyond, attention is faster uncaptured."""
ROW_MULTIPLE, MULTIPLE_FROM = 128, 1024
"""Above 1,024 rows, passes are padded to a multiple of 128: for each new number of rows cuBLAS
takes about 5 ms to choose kernels."""


class PromptGraph:
    """The pass of one size, which reads all its inputs from one tensor."""

    def __init__(
        self, models: DeviceModels, table: RequestTable, spare: int, size: int, followed: bool
    ) -> None:
        """followed: whether the drafter sees these rows, where there is one."""
        self._models, self._table, self._spare, self._size = models, table, spare, size
        self._followed = followed
        self._inputs = upload(self._packed_inputs(()), table.slots.device)
        self._run: Callable[[], PromptEnds] = self._pass

    def capture(self, pool: Any) -> None:
        """Capture the pass, with memory from a pool that nothing else uses while it runs."""
        self._run, _ = captured(self._pass, self._inputs.device, pool)

    def run(self, chunks: Sequence[PromptChunk]) -> PromptEnds:
        """The ends of the chunks that complete; valid until the next graph of the pool runs."""
        self._inputs.copy_(upload(self._packed_inputs(chunks), self._inputs.device))
        found = self._run()
        count = sum(chunk.completes for chunk in chunks)
        features = None if found.features is None else found.features[:count]
        return PromptEnds(found.logits[:count], features)

    def _packed_inputs(self, chunks: Sequence[PromptChunk]) -> list[int]:
        """All inputs of a pass, one behind another, so that a single copy brings them."""
        # rows    token, next token, position, table row     | 0, 0, 0, spare | ...   for each row
        # tiles   table row, first position, count           | spare, 0, TILE | ...   for each tile
        # ends    row at which a prompt ends                 | 0              | ...   as many
        # spans   table row, first position, first row, rows | spare, 0, 0, 0 | ...   as many
        padding = (0, 0, 0, self._spare)
        rows: list[tuple[int, ...]] = []
        tiles: list[tuple[int, ...]] = []
        spans: list[tuple[int, ...]] = []
        ends: list[int] = []
        for chunk in chunks:
            owner, places = chunk.row, range(chunk.start, chunk.stop)
            spans.append((owner, chunk.start, len(rows), chunk.rows))
            ends += [len(rows) + chunk.rows - 1] * chunk.completes
            owners = [owner] * chunk.rows
            rows += zip(chunk.tokens, chunk.following, places, owners, strict=True)
            # a tile begins with its chunk: the captured pass has tiles at every `TILE` rows
            rows += [padding] * (-chunk.rows % TILE)
            tiles += [(owner, place, min(TILE, chunk.stop - place)) for place in places[::TILE]]
        rows += [padding] * (self._size - len(rows))
        tiles += [(self._spare, 0, TILE)] * (self._size // TILE - len(tiles))
        ends += [0] * (self._size // TILE - len(ends))
        spans += [(self._spare, 0, 0, 0)] * (self._size // TILE - len(spans))
        flat = itertools.chain.from_iterable
        return [*flat(rows), *flat(tiles), *ends, *flat(spans)]

    def _pass(self) -> PromptEnds:
        count = self._size // TILE
        sizes = (4 * self._size, 3 * count, count, 4 * count)
        of_rows, of_tiles, ends, of_spans = self._inputs.split(sizes)
        tokens, following, positions, owners = of_rows.view(-1, 4).t().contiguous()
        requests, starts, counts = of_tiles.view(-1, 3).t().contiguous()
        slots, limits = self._table.slots, self._table.limits
        firsts = torch.arange(0, self._size, TILE, device=slots.device)
        writes = slots[owners, positions].where(positions < limits[owners], -1)
        rows = PassRows(slots, limits, requests, starts, firsts, counts, positions, writes, TILE)
        prompts = PromptRows(tokens, following, ends, self._recurrent(of_spans))
        return self._models.fill(prompts, _attention(rows), self._followed)

    def _recurrent(self, spans: Tensor) -> DeltaRows | None:
        """The chunks for layers that are recurrences. spans: as packed, [4 * chunks]."""
        states = self._models.states
        if states is None:
            return None
        requests, starts, firsts, counts = spans.view(-1, 4).t().contiguous()
        return DeltaRows(requests, starts, firsts, counts, counts, states.accepted, self._size)


class PromptGraphs:
    """Passes of every size, with the drafter and without; on a CPU without graphs."""

    def __init__(
        self, models: DeviceModels, table: RequestTable, spare: int, max_batched_tokens: int
    ) -> None:
        self._sizes = [size for size in PROMPT_SIZES if size <= max_batched_tokens]
        ways = [False] if models.network is None else [False, True]
        self._graphs = {
            followed: [PromptGraph(models, table, spare, size, followed) for size in self._sizes]
            for followed in ways
        }

    def capture(self, pool: Any) -> None:
        """Capture every size."""
        for graphs in self._graphs.values():
            for graph in reversed(graphs):
                graph.capture(pool)

    def fit(self, chunks: Sequence[PromptChunk], followed: bool) -> PromptGraph | None:
        """The smallest pass that holds the chunks; None where they are too long together."""
        rows = sum(chunk.rows + -chunk.rows % TILE for chunk in chunks)
        pairs = rows * max(chunk.stop for chunk in chunks)
        place = bisect.bisect_left(self._sizes, rows)
        if place == len(self._sizes) or pairs > MOST_PAIRS:
            return None
        return self._graphs[followed][place]


def _attention(rows: PassRows) -> Attention:
    def over(cache: KVCache) -> AttendProduct:
        tiles = functools.cache(lambda window: cache.rows_for(window, rows))
        return lambda layer, qkv, heads: store_attend(
            qkv, heads, cache.layers[layer], tiles(heads.window)
        )

    return over


class Prefill:
    """Runs prompt chunks, which fills the target's cache and the drafter's."""

    def __init__(self, models: DeviceModels, table: RequestTable, graphs: PromptGraphs) -> None:
        self._models, self._table, self._graphs = models, table, graphs

    def run(self, chunks: Sequence[PromptChunk], followed: bool) -> PromptEnds:
        """The target over some chunks, and the drafter where it follows one of them.

        Long chunks from position 0 should come first, equal ones adjacent. Captured passes read the
        ends of prompts alone, so that those to be scored run outside of them.
        """
        scored = scored_rows(chunks)
        graph = None if scored else self._graphs.fit(chunks, followed)
        if graph is not None:
            return graph.run(chunks)
        device = self._table.slots.device
        tokens = [token for chunk in chunks for token in chunk.tokens]
        following = [token for chunk in chunks for token in chunk.following]
        padding = _padding(len(tokens))
        # rows of padding: their keys are written nowhere, and nobody reads what becomes of them
        tokens += [0] * padding
        following += [0] * padding
        spans = [Span(chunk.row, chunk.start, chunk.rows) for chunk in chunks]
        attention = prompt_attention(self._table, spans, padding)
        states = self._models.states
        recurrent = None if states is None else states.rows_of(spans, [s.count for s in spans])
        own, after, ends = (upload(each, device) for each in (tokens, following, _ends(chunks)))
        rows = PromptRows(own, after, ends, recurrent, upload(scored, device) if scored else None)
        return self._models.fill(rows, attention, followed)

    def fill_network(self, state: CycleState, spans: Sequence[Span], most: int) -> None:
        """The drafter alone over positions that wait for it: the first ones of each row's.

        most: rows of a pass; none of the spans has more.
        """
        for own in neighbours([span.count for span in spans], most):
            self._fill_network(state, spans[own])

    def _fill_network(self, state: CycleState, spans: Sequence[Span]) -> None:
        device, count = state.computed.device, sum(span.count for span in spans)
        padding = _padding(count)
        # features lie by table row in the order of positions: a pass takes the first ones of each
        # row
        rows = [span.row for span in spans for _ in range(span.count)] + [spans[0].row] * padding
        places = [place for span in spans for place in range(span.count)] + [0] * padding
        waiting = upload(rows, device), upload(places, device)
        attention = prompt_attention(self._table, spans, padding)
        self._models.fill_network(state.emitted[waiting], state.features[waiting], attention)

    def warm_up(self, most: int) -> None:
        """Compile experts for passes of up to `most` tokens, and plan single prompts as long.

        Call it on the engine's thread, since cuDNN's plans belong to a thread. Only Hopper with
        16-bit numbers uses them; without cuDNN, attention may have no memory for long prompts.
        """
        ours = self._models
        parts = ours.target.modules()
        if experts := next((part for part in parts if isinstance(part, RoutedExperts)), None):
            experts.warm_up(most)
        models = [(ours.layers, ours.target_cache)]
        if ours.network is not None and ours.network_cache is not None:
            models.append((ours.network.layers, ours.network_cache))
        longest = min(most, self._table.slots.shape[1])
        for layers, cache in models:
            if on_hopper(self._table.slots) and cache.dtype.itemsize == 2:
                _plan(layers, cache, longest)


def _plan(layers: FusedLayers, cache: KVCache, longest: int) -> None:
    """Plan the prompts of each size of heads over which torch attends."""
    planned: set[tuple[int, int, int]] = set()
    for layer, spec in layers.specs.items():
        if by_torch(spec) and spec.sizes not in planned:
            planned.add(spec.sizes)
            warm_up(spec, cache.layers[layer], cache.dtype, longest)


def in_order(chunks: Sequence[PromptChunk]) -> list[PromptChunk]:
    """Chunks that begin a prompt first, the longest of them before others."""
    return sorted(chunks, key=lambda chunk: (chunk.start > 0, -chunk.rows))


def _padding(rows: int) -> int:
    return -rows % ROW_MULTIPLE if rows > MULTIPLE_FROM else 0


def _ends(chunks: Sequence[PromptChunk]) -> list[int]:
    """The batch rows that give completing chunks their next token."""
    stops = itertools.accumulate(chunk.rows for chunk in chunks)
    return [stop - 1 for chunk, stop in zip(chunks, stops, strict=True) if chunk.completes]

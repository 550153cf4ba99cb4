"""Prompt chunks through target and drafter, outside the captured cycle."""

import itertools
from collections.abc import Sequence

from peagle.engine.device.models import DeviceModels, PromptEnds, PromptRows
from peagle.engine.device.prompt_attention import by_torch, prompt_attention, warm_up
from peagle.engine.device.prompt_graphs import PromptGraphs
from peagle.engine.kv_cache import KVCache
from peagle.engine.logprobs import scored_rows
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import Span, neighbours
from peagle.engine.step import PromptChunk
from peagle.models.fused import FusedLayers
from peagle.ops.cycle_state import CycleState
from peagle.ops.moe import RoutedExperts
from peagle.ops.triton import on_hopper
from peagle.transfer import upload

ROW_MULTIPLE, MULTIPLE_FROM = 128, 1024
"""Above 1,024 rows, passes are padded to a multiple of 128: for each new number of rows cuBLAS
takes about 5 ms to choose kernels."""


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

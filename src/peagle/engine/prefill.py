"""Prompt chunks through target and drafter, beside the captured cycle and not in it."""

import itertools
from collections.abc import Sequence

from peagle.drafters.drafter import Span
from peagle.engine.batch import Scheduled
from peagle.engine.prompt_attention import plan, prompt_attention
from peagle.engine.prompt_graphs import PromptGraphs
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import Ends, Prompts, ResidentCycle
from peagle.engine.upload import upload
from peagle.ops.triton import on_hopper

WHOLE, WHOLE_FROM = 128, 1024
"""Launched rows come in multiples of so many, from so many on: for a number that was not met before
cuBLAS takes some 5 ms to choose kernels."""


class Prefill:
    """Runs chunks: the target's keys, and the drafter's."""

    def __init__(self, cycle: ResidentCycle, table: RequestTable, graphs: PromptGraphs) -> None:
        self._cycle, self._table, self._graphs = cycle, table, graphs

    def run(self, chunks: Sequence[Scheduled]) -> Ends:
        """Chunks of like length that begin at 0 should stand together: they attend at once."""
        graph = self._graphs.fit(chunks)
        if graph is not None:
            return graph.run(chunks)
        device = self._table.slots.device
        tokens = [token for item in chunks for token in item.tokens]
        following = [token for item in chunks for token in item.following]
        idle = -len(tokens) % WHOLE if len(tokens) > WHOLE_FROM else 0
        tokens += [0] * idle
        following += [0] * idle
        given = (upload(values, device) for values in (tokens, following, _ends(chunks)))
        spans = [Span(item.request.row, item.start, item.rows) for item in chunks]
        per_layer_attention = self._cycle.target.config.per_layer_attention
        attention = prompt_attention(self._table, spans, per_layer_attention, idle)
        return self._cycle.fill(Prompts(*given), attention)

    def plan(self, most: int) -> None:
        """Make ready what a prompt alone of at most so many tokens would wait for.

        On the thread that is to run it, which cuDNN's plans belong to, and where they are used: on
        Hopper, for numbers of 16 bits. Without cuDNN attention may have no room for long prompts.
        """
        cycle = self._cycle
        parts = [(cycle.layers, cycle.target_cache)]
        if cycle.drafter is not None and cycle.drafter_cache is not None:
            parts.append((cycle.drafter.layers, cycle.drafter_cache))
        for layers, cache in parts:
            if on_hopper(cache) and cache.dtype.itemsize == 2 and layers.specs[0].full:
                plan(layers.specs[0], cache[0], most)


def _ends(chunks: Sequence[Scheduled]) -> list[int]:
    """The batch rows that give completing chunks their next token."""
    behind = itertools.accumulate(item.rows for item in chunks)
    return [stop - 1 for item, stop in zip(chunks, behind, strict=True) if item.completes]

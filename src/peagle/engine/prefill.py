"""Prompt chunks through target and drafter, beside the captured cycle and not in it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from peagle.drafters.drafter import Span
from peagle.engine.batch import Scheduled, places, tile_rows
from peagle.engine.prompt_graphs import PromptGraphs
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import Attention, Ends, Prompts, ResidentCycle
from peagle.engine.upload import upload
from peagle.models.fused import AttendProduct
from peagle.ops.cached_attention import Heads, store, store_attend


class Prefill:
    """Runs chunks: the target's keys, and the drafter's."""

    def __init__(self, cycle: ResidentCycle, table: RequestTable, graphs: PromptGraphs) -> None:
        self._cycle, self._table, self._graphs = cycle, table, graphs

    def run(self, chunks: Sequence[Scheduled]) -> Ends:
        """Chunks of equal length that begin at 0 should stand together: they attend at once."""
        graph = self._graphs.fit(chunks)
        if graph is not None:
            return graph.run(chunks)
        device = self._table.slots.device
        tokens = [token for item in chunks for token in item.tokens]
        following = [token for item in chunks for token in item.following]
        given = (upload(values, device) for values in (tokens, following, _ends(chunks)))
        spans = [Span(item.request.row, item.start, item.rows) for item in chunks]
        return self._cycle.fill(Prompts(*given), self._attention(spans))

    def _attention(self, spans: Sequence[Span]) -> Attention:
        groups = _groups(spans)
        positions, slots = places(self._table, spans)
        tiles = tile_rows(self._table, spans) if self._cycle.target.config.focused else None

        def over(cache: Tensor) -> AttendProduct:
            def attend(layer: int, qkv: Tensor, heads: Heads) -> Tensor:
                if not heads.whole:
                    assert tiles is not None
                    return store_attend(qkv, heads, cache[layer], tiles)
                query, key, value = store(qkv, heads, cache[layer], positions, slots)
                attended = [self._group(query, key, value, cache[layer], one) for one in groups]
                return attended[0] if len(attended) == 1 else torch.cat(attended)

            return attend

        return over

    def _group(
        self, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, group: "_Group"
    ) -> Tensor:
        share = slice(group.first, group.first + group.members * group.rows)
        query = query[share]
        if group.start == 0:
            key, value = key[share], value[share]
        else:
            context = self._table.slots[group.table_row, : group.start + group.rows]
            key, value = (side.index_select(0, context) for side in cache)
        shape = (group.members, -1)
        attended = causal_attention(
            *(side.unflatten(0, shape).transpose(1, 2) for side in (query, key, value))
        )
        return attended.transpose(1, 2).reshape(len(query), -1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last rows of a context: [members, heads, rows, head_dim], like query."""
    if query.shape[2] == key.shape[2]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    group = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(group, dim=1) for side in (key, value))
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


@dataclass(frozen=True)
class _Group:
    """Chunks that attend in one call: equal ones from position 0, or one with a context."""

    table_row: int
    start: int
    rows: int
    first: int
    members: int


def _groups(spans: Sequence[Span]) -> list[_Group]:
    groups: list[_Group] = []
    first = 0
    for span in spans:
        last = groups[-1] if groups else None
        if last and span.start == 0 == last.start and span.count == last.rows:
            groups[-1] = _Group(last.table_row, 0, span.count, last.first, last.members + 1)
        else:
            groups.append(_Group(span.row, span.start, span.count, first, 1))
        first += span.count
    return groups


def _ends(chunks: Sequence[Scheduled]) -> list[int]:
    """The batch rows that give completing chunks their next token."""
    behind = itertools.accumulate(item.rows for item in chunks)
    return [stop - 1 for item, stop in zip(chunks, behind, strict=True) if item.completes]

"""Attention of a pass in torch's operations: gathered, contiguous, or in tiles."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.drafter import Span
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import places, tile_rows
from peagle.models.decoder import Attend
from peagle.models.spec import DecoderSpec
from peagle.ops import cached_attention
from peagle.ops.attention import (
    AttentionGroup,
    attend,
    causal_bias,
    paged_attention,
    write_kv,
)
from peagle.ops.cached_attention import AttentionHeads, PassRows
from peagle.transfer import upload


class HostCache(KVCache):
    """A cache that a pass over spans of requests can be opened on."""

    def __init__(
        self, spec: DecoderSpec, table: RequestTable, slots: int, dtype: torch.dtype
    ) -> None:
        super().__init__(spec, table, slots, dtype)
        self._table = table
        self._gathers = self.alike and all(layer.attention.full for layer in spec.layers)

    def open(self, spans: Sequence[Span]) -> tuple[Tensor, Attend]:
        """Positions [rows] of some spans, in order, and the attention of one pass over them."""
        if not self._gathers:
            tiles = tile_rows(self._table, spans)
            return tiles.positions, TiledAttend(self.layers, tiles)
        if len(spans) == 1:
            run = self._table.contiguous_from(spans[0].row)
            if run is not None:
                attention = ContiguousAttend(self.tensor, run, spans[0])
                return attention.positions, attention
        rows = gather_rows(self._table, spans, self.tensor.dtype)
        return rows.positions, PagedAttend(self.layers, rows)


@dataclass(frozen=True)
class Rows:
    """Positions of a pass and where their keys are: what attention needs to know."""

    positions: Tensor
    """[rows]"""
    slots: Tensor
    """[rows] cache slot that each row writes."""
    groups: tuple[AttentionGroup, ...]


class PagedAttend:
    """Attention of a pass over any requests, whose keys and values are gathered layer by layer."""

    def __init__(self, layers: Sequence[Tensor], rows: Rows) -> None:
        self._layers, self._rows = layers, rows

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: AttentionHeads
    ) -> Tensor:
        """Store this pass's keys and values, then attend to everything each row may see."""
        write_kv(self._layers[layer], self._rows.slots, key, value)
        return paged_attention(query, self._layers[layer], self._rows.groups, heads.scale)


class ContiguousAttend:
    """The same for one request whose slots are contiguous: views in place of gathering."""

    def __init__(self, cache: Tensor, run: int, span: Span) -> None:
        stop = span.start + span.count
        self.positions = torch.arange(span.start, stop, device=cache.device)
        one = span.count == 1
        self._bias = None if one else causal_bias(self.positions[None], stop, cache.dtype)
        sides = cache.flatten(0, 1)
        self._written = sides[:, run + span.start : run + stop].unbind()
        self._seen = sides[:, None, run : run + stop].transpose(2, 3).unbind()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: AttentionHeads
    ) -> Tensor:
        """As `PagedAttend`."""
        first, second = 2 * layer, 2 * layer + 1
        self._written[first].copy_(key)
        self._written[second].copy_(value)
        return attend(query, self._seen[first], self._seen[second], self._bias, heads.scale)


class TiledAttend:
    """The same where layers have windows, sinks or keys of several shapes."""

    def __init__(self, layers: Sequence[Tensor], rows: PassRows) -> None:
        self._layers, self._rows = layers, rows

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: AttentionHeads
    ) -> Tensor:
        """As `PagedAttend`."""
        write_kv(self._layers[layer], self._rows.writes, key, value)
        attended = cached_attention.attend(query, heads, self._layers[layer], self._rows)
        return attended.view(query.shape)


def gather_rows(table: RequestTable, spans: Sequence[Span], dtype: torch.dtype) -> Rows:
    """The rows of some spans, in the order given, grouped by their number of queries."""
    positions, slots = places(table, spans)
    firsts, counts = _firsts(spans), sorted({span.count for span in spans})
    groups = tuple(
        _group(table, spans, [i for i, s in enumerate(spans) if s.count == count], firsts, dtype)
        for count in counts
    )
    return Rows(positions, slots, groups)


def _firsts(spans: Sequence[Span]) -> list[int]:
    """The batch row at which each span begins."""
    firsts = [0]
    for span in spans[:-1]:
        firsts.append(firsts[-1] + span.count)
    return firsts


def _group(
    table: RequestTable,
    spans: Sequence[Span],
    members: list[int],
    firsts: list[int],
    dtype: torch.dtype,
) -> AttentionGroup:
    device, count = table.slots.device, spans[members[0]].count
    context = max(spans[i].start for i in members) + count
    offsets = torch.arange(count, device=device)
    starts = upload([spans[i].start for i in members], device)
    stops = starts + count
    rows = upload([firsts[i] for i in members], device)
    table_rows = upload([spans[i].row for i in members], device)
    return AttentionGroup(
        rows=(rows[:, None] + offsets).view(-1),
        slots=table.context(table_rows, stops, context),
        bias=causal_bias(starts[:, None] + offsets, context, dtype),
    )

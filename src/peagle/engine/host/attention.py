"""Attention of a pass in torch's operations: gathered, contiguous, or in tiles."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import TILE, Span, places, tile_rows
from peagle.models.decoder import Attend
from peagle.ops import cached_attention
from peagle.ops.attention import (
    AttentionGroup,
    attend,
    causal_bias,
    paged_attention,
    write_kv,
)
from peagle.ops.cached_attention import AttentionHeads, PassRows
from peagle.ops.draft import Tree
from peagle.transfer import upload


def open_pass(
    cache: KVCache, spans: Sequence[Span], tree: Tree | None = None, whole: bool = False
) -> tuple[Tensor, Attend]:
    """Positions [rows] of some spans, in order, and the attention of one pass over them.

    tree: how the rows of the only span branch, where no layer has a window; None: they do not.
    whole: whether rows of a span may see all others of it, where layers are not causal.
    """
    if not (cache.alike and cache.full) or cache.narrow:
        most = max(span.count for span in spans) if whole else TILE
        attention = TiledAttend(cache, tile_rows(cache.table, spans, most))
        return attention.positions, attention
    bias = None if tree is None else _tree_bias(tree, spans[0].start, cache.dtype)
    positions, attend = _plain(cache, spans, bias)
    return positions if tree is None else spans[0].start + tree.depths[0], attend


def _plain(cache: KVCache, spans: Sequence[Span], bias: Tensor | None) -> tuple[Tensor, Attend]:
    """Where all layers are alike. bias: as of `AttentionGroup`, of the only span; None: rows see
    what comes before them."""
    run = cache.table.contiguous_from(spans[0].row) if len(spans) == 1 else None
    if run is not None:
        views = ContiguousAttend(cache.tensor, [*cache.layers], run, spans[0], bias)
        return views.positions, views
    rows = gather_rows(cache.table, spans, cache.dtype)
    if bias is not None:
        rows = replace(rows, groups=(replace(rows.groups[0], bias=bias),))
    return rows.positions, PagedAttend(cache.layers, rows)


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

    def __init__(self, layers: Mapping[int, Tensor], rows: Rows) -> None:
        self._layers, self._rows = layers, rows

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: AttentionHeads
    ) -> Tensor:
        """Store this pass's keys and values, then attend to everything each row may see."""
        write_kv(self._layers[layer], self._rows.slots, key, value)
        return paged_attention(query, self._layers[layer], self._rows.groups, heads.scale)


class ContiguousAttend:
    """The same for one request whose slots are contiguous: views in place of gathering."""

    def __init__(
        self,
        cache: Tensor,
        layers: Sequence[int],
        run: int,
        span: Span,
        bias: Tensor | None = None,
    ) -> None:
        """cache: of `layers`, [layers, 2, slots, kv_heads, head_dim]; bias: as of `AttentionGroup`;
        None: rows see what comes before them."""
        stop = span.start + span.count
        self.positions = torch.arange(span.start, stop, device=cache.device)
        if bias is None and span.count > 1:
            bias = causal_bias(self.positions[None], stop, cache.dtype)
        self._bias, self._places = bias, {layer: 2 * i for i, layer in enumerate(layers)}
        sides = cache.flatten(0, 1)
        self._written = sides[:, run + span.start : run + stop].unbind()
        self._seen = sides[:, None, run : run + stop].transpose(2, 3).unbind()

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: AttentionHeads
    ) -> Tensor:
        """As `PagedAttend`."""
        first = self._places[layer]
        second = first + 1
        self._written[first].copy_(key)
        self._written[second].copy_(value)
        return attend(query, self._seen[first], self._seen[second], self._bias, heads.scale)


class TiledAttend:
    """The same where layers have windows, sinks or keys of several shapes."""

    def __init__(self, cache: KVCache, rows: PassRows) -> None:
        self._layers, self.positions = cache.layers, rows.positions
        self._rows = functools.cache(lambda window: cache.rows_for(window, rows))

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, heads: AttentionHeads
    ) -> Tensor:
        """As `PagedAttend`."""
        rows = self._rows(heads.window)
        cached_attention.write(self._layers[layer], rows.writes, (key, value), heads)
        attended = cached_attention.attend(query, heads, self._layers[layer], rows)
        return attended.view(query.shape)


def _tree_bias(tree: Tree, start: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, rows, context]: 0 where a row may look: at all before the root, and its ancestors."""
    words = tree.ancestors[0, :, None]
    rows = len(words)
    hidden = (words >> torch.arange(rows, device=words.device)) & 1 == 0
    bias = torch.zeros(1, 1, rows, start + rows, dtype=dtype, device=words.device)
    bias[0, 0, :, start:].masked_fill_(hidden, float("-inf"))
    return bias


def gather_rows(table: RequestTable, spans: Sequence[Span], dtype: torch.dtype) -> Rows:
    """The rows of some spans, in the order given, grouped by their number of queries."""
    positions, slots = places(table.slots, spans)
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

"""Attention of a pass in torch's operations: gathered, contiguous, or in tiles."""

import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.kv_cache import KVCache
from peagle.engine.spans import TILE, Span, places, tile_rows
from peagle.models.decoder import Attend
from peagle.ops import cached_attention
from peagle.ops.attention import AttentionGroup, attend, causal_bias, paged_attention, write_kv
from peagle.ops.cached_attention import QKV, AttentionHeads, PassRows
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
        tiled = TiledAttend(cache, tile_rows(cache.table, spans, most))
        return tiled.positions, tiled
    bias = None if tree is None else _tree_bias(tree, spans[0].start, cache.dtype)
    run = cache.table.contiguous_from(spans[0].row) if len(spans) == 1 else None
    if run is None:
        own: PagedAttend | ContiguousAttend = PagedAttend(cache, spans, bias)
    else:
        own = ContiguousAttend(cache, run, spans[0], bias)
    return own.positions if tree is None else spans[0].start + tree.depths[0], own


class PagedAttend:
    """Attention of a pass over any requests, whose keys and values are gathered layer by layer."""

    def __init__(self, cache: KVCache, spans: Sequence[Span], bias: Tensor | None = None) -> None:
        """bias: as of `AttentionGroup`, of the only span; None: rows see what comes before them."""
        self.positions, self._slots = places(cache.table.slots, spans)
        firsts = itertools.accumulate((span.count for span in spans), initial=0)
        # requests with as many rows attend in one call
        members: dict[int, list[tuple[Span, int]]] = {}
        for span, first in zip(spans, firsts, strict=False):
            members.setdefault(span.count, []).append((span, first))
        self._layers = cache.layers
        self._groups = [_group(cache, count, members[count], bias) for count in sorted(members)]

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """Store this pass's keys and values, then attend to everything each row may see."""
        write_kv(self._layers[layer], self._slots, qkv.key, qkv.value)
        return paged_attention(qkv.query, self._layers[layer], self._groups, heads.scale)


class ContiguousAttend:
    """Attention of a pass over one request whose slots are contiguous: views, where others
    gather."""

    def __init__(self, cache: KVCache, run: int, span: Span, bias: Tensor | None = None) -> None:
        """run: the request's first slot; bias: as of `PagedAttend`."""
        stop, tensor = span.start + span.count, cache.tensor
        self.positions = torch.arange(span.start, stop, device=tensor.device)
        if bias is None and span.count > 1:
            bias = causal_bias(self.positions[None], stop, tensor.dtype)
        self._bias, self._places = bias, {layer: 2 * i for i, layer in enumerate(cache.layers)}
        # one call makes the views of all layers, keys at even places and values at odd ones
        sides = tensor.flatten(0, 1)
        self._written = sides[:, run + span.start : run + stop].unbind()
        self._seen = sides[:, None, run : run + stop].transpose(2, 3).unbind()

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """As `PagedAttend`."""
        first = self._places[layer]
        second = first + 1
        self._written[first].copy_(qkv.key)
        self._written[second].copy_(qkv.value)
        return attend(qkv.query, self._seen[first], self._seen[second], self._bias, heads.scale)


class TiledAttend:
    """Attention of a pass where layers have windows, sinks or keys of several shapes."""

    def __init__(self, cache: KVCache, rows: PassRows) -> None:
        self._layers, self.positions = cache.layers, rows.positions
        self._rows = functools.cache(lambda window: cache.rows_for(window, rows))

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """As `PagedAttend`."""
        rows = self._rows(heads.window)
        cached_attention.write(self._layers[layer], rows.writes, (qkv.key, qkv.value), heads)
        attended = cached_attention.attend(qkv.query, heads, self._layers[layer], rows)
        return attended.view(qkv.query.shape)


def _tree_bias(tree: Tree, start: int, dtype: torch.dtype) -> Tensor:
    """[1, 1, rows, context]: 0 where a row may look: at all before the root, and its ancestors."""
    words = tree.ancestors[0]
    hidden = cached_attention.tree_mask(words, start + len(words))
    bias = torch.zeros(hidden.shape, dtype=dtype, device=words.device)
    return bias.masked_fill_(hidden, float("-inf"))[None, None]


def _group(
    cache: KVCache, count: int, members: Sequence[tuple[Span, int]], bias: Tensor | None
) -> AttentionGroup:
    """Spans of `count` rows, each with its first one in the pass."""
    table, device = cache.table, cache.table.slots.device
    numbers = zip(*((span.row, span.start, first) for span, first in members), strict=True)
    requests, starts, firsts = (upload(column, device) for column in numbers)
    context, offsets = max(s.start for s, _ in members) + count, torch.arange(count, device=device)
    if bias is None:
        bias = causal_bias(starts[:, None] + offsets, context, cache.dtype)
    rows = (firsts[:, None] + offsets).view(-1)
    return AttentionGroup(rows, table.context(requests, starts + count, context), bias)

"""Prompt chunks through target and drafter, beside the captured cycle and not in it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from peagle.drafters.drafter import Span
from peagle.drafters.resident import known_inputs
from peagle.engine.batch import Scheduled, places, tile_rows
from peagle.engine.request_table import RequestTable
from peagle.engine.resident_cycle import ResidentCycle
from peagle.engine.upload import upload
from peagle.models.fused import AttendProduct, Taps
from peagle.ops import cached_attention, residual
from peagle.ops.cached_attention import Heads, store


@dataclass(frozen=True)
class Ends:
    """What chunks that complete their prompt leave for the first cycle, in the order given."""

    logits: Tensor
    """[completing chunks, vocab]"""
    features: Tensor | None
    """[completing chunks, hidden_size], projected; None without a drafter."""


class Prefill:
    """Runs chunks: the target's keys, and the drafter's for every position whose next is known."""

    def __init__(self, cycle: ResidentCycle, table: RequestTable) -> None:
        self._cycle, self._table = cycle, table

    def run(self, chunks: Sequence[Scheduled]) -> Ends:
        """Chunks of equal length that begin at 0 should stand together: they attend at once."""
        target = self._cycle.target
        device = target.embed.weight.device
        spans = [(item.request.row, item.start, item.rows) for item in chunks]
        tokens = upload(
            [t for item in chunks for t in item.request.tokens[item.start : item.stop]], device
        )
        x = target.embed(tokens)
        taps = self._cycle.taps(len(tokens))
        first = residual.normed(x, self._cycle.layers.layers[0].input_norm)
        attend = self._attend(self._cycle.target_cache, spans)
        stream, _ = self._cycle.layers(x, first, attend, taps)
        ends = upload(_ends(chunks), device)
        features = self._fill_drafter(chunks, taps, ends)
        if not len(ends):
            return Ends(stream.new_empty(0, target.config.vocab_size), features)
        last = residual.normed(stream.index_select(0, ends), target.norm)
        return Ends(residual.linear(last, target.head), features)

    def _fill_drafter(
        self, chunks: Sequence[Scheduled], taps: Taps | None, ends: Tensor
    ) -> Tensor | None:
        drafter, cache = self._cycle.drafter, self._cycle.drafter_cache
        if drafter is None or cache is None or taps is None:
            return None
        features = drafter.model.project(taps.into)
        spans: list[tuple[int, int, int]] = []
        following: list[int] = []
        kept: list[int] = []
        for item, first in zip(chunks, _firsts(chunks), strict=True):
            known = item.rows - item.completes
            following += item.request.tokens[item.start + 1 : item.start + 1 + known]
            kept += range(first, first + known)
            if known:
                spans.append((item.request.row, item.start, known))
        if kept:
            index, tokens = (upload(values, features.device) for values in (kept, following))
            stream, x = known_inputs(drafter.model, tokens, features.index_select(0, index))
            drafter.layers.write_keys(stream, x, self._attend(cache, spans))
        return features.index_select(0, ends)

    def _attend(self, cache: Tensor, spans: Sequence[tuple[int, int, int]]) -> AttendProduct:
        named, groups = [Span(*span) for span in spans], _groups(spans)
        positions, slots = places(self._table, named)
        tiles = tile_rows(self._table, named) if self._cycle.target.config.focused else None

        def attend(layer: int, qkv: Tensor, heads: Heads) -> Tensor:
            query, key, value = store(qkv, heads, cache[layer], positions, slots)
            if not heads.whole:
                assert tiles is not None
                return cached_attention.attend(query, heads, cache[layer], tiles)
            attended = [self._group(query, key, value, cache[layer], group) for group in groups]
            return attended[0] if len(attended) == 1 else torch.cat(attended)

        return attend

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


def _groups(spans: Sequence[tuple[int, int, int]]) -> list[_Group]:
    groups: list[_Group] = []
    first = 0
    for row, start, rows in spans:
        last = groups[-1] if groups else None
        if last and start == 0 == last.start and rows == last.rows:
            groups[-1] = _Group(last.table_row, 0, rows, last.first, last.members + 1)
        else:
            groups.append(_Group(row, start, rows, first, 1))
        first += rows
    return groups


def _firsts(chunks: Sequence[Scheduled]) -> list[int]:
    """The batch row at which each chunk begins."""
    return [0, *itertools.accumulate(item.rows for item in chunks)][:-1]


def _ends(chunks: Sequence[Scheduled]) -> list[int]:
    """The batch rows that give completing chunks their next token."""
    pairs = zip(chunks, _firsts(chunks), strict=True)
    return [first + item.rows - 1 for item, first in pairs if item.completes]

"""Attention of prompts that are launched kernel by kernel, by the fastest kernels that torch has.

cuDNN plans a kernel for every shape, which takes longer than reading a thousand tokens, and prompts
have any length. So chunks that begin a prompt are padded to a few lengths by repeating their last
row, which no row before it sees. Chunks after a context, and short ones of many lengths, share one
call of a variable-length kernel, which needs no plan: one call for each would keep the host busy
for longer than the pass takes.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.engine.device.models import Attention
from peagle.engine.kv_cache import KVCache
from peagle.engine.request_table import RequestTable
from peagle.engine.spans import TILE, Span, places, tile_rows
from peagle.models.fused import AttendProduct
from peagle.ops.cached_attention import QKVSpec, store, store_attend
from peagle.ops.kv_dtype import gathered
from peagle.transfer import upload

Sides = tuple[Tensor, Tensor, Tensor]
"""Queries, keys and values of the layout's rows: [rows, heads, head_dim]."""
OLDEST_FLASH = (8, 0)
"""The oldest GPU that torch's variable-length kernel runs on."""
MIN_STEP = 16
"""Smallest distance of two lengths that chunks are padded to."""
MAX_CALLS = 2
"""Calls, one for each length, beyond which short chunks share one."""
MAX_SHARED_ROWS = 1024
"""Prompts that begin with longer chunks do not share a call: its kernel takes twice as long."""


def prompt_attention(table: RequestTable, spans: Sequence[Span], padding: int = 0) -> Attention:
    """The attention of one pass over prompt chunks.

    Chunks from position 0 that are padded to one length attend in one call if they are adjacent;
    long ones should come first. padding: rows after the chunks'.
    """
    layout = functools.cache(lambda: _laid_out(table, spans, padding))
    # of whole tiles, as captured prompts are, though spans may be shorter: kernels exist for those
    whole = functools.cache(lambda: replace(tile_rows(table, spans), most=TILE))

    def over(cache: KVCache) -> AttendProduct:
        tiles = functools.cache(lambda window: cache.rows_for(window, whole()))

        def attend(layer: int, qkv: Tensor, spec: QKVSpec) -> Tensor:
            if by_torch(spec):
                return layout().attend(qkv, spec, cache.layers[layer])
            own, rows = qkv[: len(qkv) - padding], tiles(spec.window)
            attended = store_attend(own, spec, cache.layers[layer], rows)
            return F.pad(attended, (0, 0, 0, padding)) if padding else attended

        return attend

    return over


def by_torch(spec: QKVSpec) -> bool:
    """Whether torch's kernels attend; else ours do, tile by tile."""
    return spec.full and spec.scale is None and not spec.batch_invariant


def warm_up(spec: QKVSpec, cache: Tensor, dtype: torch.dtype, most: int) -> None:
    """Attend once at every length that a single prompt of up to `most` tokens is padded to.

    The variable-length kernel attends once as well, since it is loaded at its first call.

    cache: one layer's, [2, slots, kv_heads, head_dim]; it is not changed. dtype: of the rows.
    """
    lengths = {filled(count) for count in range(1, most + 1)}
    for rows in sorted(lengths, reverse=True):  # shorter ones reuse the memory of longer ones
        _attend_once(_Group(0, rows, members=1), spec, cache, dtype)
    _attend_once(_Packed(0, Bounds((1, 1), (1, 1), cache.device)), spec, cache, dtype)


def _attend_once(
    part: "_Group | _Packed", spec: QKVSpec, cache: Tensor, dtype: torch.dtype
) -> None:
    rows, width = sum(part.laid), (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    nowhere = torch.full((rows,), -1, device=cache.device)
    layout = _Layout((part,), torch.zeros_like(nowhere), nowhere, None, None)
    rows_of_zeros = torch.zeros(rows, width, dtype=dtype, device=cache.device)
    layout.attend(rows_of_zeros, spec, cache)


def filled(rows: int) -> int:
    """The length that a prompt is padded to: one of four between two powers of two."""
    step = max(MIN_STEP, 1 << max((rows - 1).bit_length() - 3, 0))
    return -(-rows // step) * step


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of the last rows of a context: [members, heads, rows, head_dim], like query."""
    # torch's causal mask begins at the first key: right only for a whole context
    if query.shape[2] == key.shape[2]:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, two seconds

    group = query.shape[1] // key.shape[1]
    key, value = (side.repeat_interleave(group, dim=1) for side in (key, value))
    bias = causal_lower_right(query.shape[2], key.shape[2])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def packed_attention(query: Tensor, key: Tensor, value: Tensor, bounds: "Bounds") -> Tensor:
    """Attention of several chunks, each to the end of its own context; all are concatenated.

    query: [rows, heads, head_dim], like the result; key, value: [positions, kv_heads, head_dim].
    """
    # flash attention multiplies 16-bit numbers alone
    if bounds.ends is not None and query.dtype.itemsize == 2:
        flash = torch.ops.aten._flash_attention_forward
        return flash(query, key, value, *bounds.ends, *bounds.longest, 0.0, True, False)[0]
    queries, contexts = query.split(bounds.counts), (x.split(bounds.contexts) for x in (key, value))
    attended = [
        causal_attention(*(side[None].transpose(1, 2) for side in sides))
        for sides in zip(queries, *contexts, strict=True)
    ]
    return torch.cat([one.transpose(1, 2)[0] for one in attended])


class Bounds:
    """Where concatenated chunks and their contexts begin and end."""

    def __init__(
        self, counts: Sequence[int], contexts: Sequence[int], device: torch.device
    ) -> None:
        """contexts: positions that the last row of each chunk sees, its own included."""
        self.counts, self.contexts = list(counts), list(contexts)
        self.longest = max(counts), max(contexts)
        self.ends: tuple[Tensor, Tensor] | None = None
        """[chunks + 1] int32 from 0, of both; None where there is no kernel that reads them."""
        if device.type == "cuda" and torch.cuda.get_device_capability(device) >= OLDEST_FLASH:
            rows, positions = ([0, *itertools.accumulate(sizes)] for sizes in (counts, contexts))
            self.ends = upload(rows, device).int(), upload(positions, device).int()


@dataclass(frozen=True)
class _Group:
    """Chunks of one length from position 0."""

    first: int
    """The chunks' first row in the layout."""
    rows: int
    """Rows of each chunk, padding included."""
    members: int

    @property
    def laid(self) -> list[int]:
        """Rows of each chunk in the layout."""
        return [self.rows] * self.members

    def attend(self, sides: Sides, _cache: Tensor, _kv_scales: tuple[float, float]) -> Tensor:
        """Attended values [members * rows, heads * head_dim]."""
        own, shape = slice(self.first, self.first + self.members * self.rows), (self.members, -1)
        chunks = (side[own].unflatten(0, shape).transpose(1, 2) for side in sides)
        attended = causal_attention(*chunks)
        return attended.transpose(1, 2).flatten(0, 1).flatten(1)


@dataclass(frozen=True)
class _Packed:
    """Chunks of any lengths, without padding."""

    first: int
    bounds: Bounds
    context: Tensor | None = None
    """[positions] cache slots of all that each chunk sees; None: all begin at position 0."""

    @property
    def laid(self) -> list[int]:
        """As in `_Group`."""
        return self.bounds.counts

    def attend(self, sides: Sides, cache: Tensor, kv_scales: tuple[float, float]) -> Tensor:
        """As in `_Group`. cache: one layer's, which holds the chunks' own keys as well."""
        query, key, value = (side[self.first : self.first + sum(self.laid)] for side in sides)
        if self.context is not None:
            key, value = gathered(cache, self.context, query.dtype, kv_scales)
        return packed_attention(query, key, value, self.bounds).flatten(1)


@dataclass(frozen=True)
class _Layout:
    """How a pass's rows are laid out to attend."""

    parts: tuple[_Group | _Packed, ...]
    positions: Tensor
    """[laid rows]"""
    writes: Tensor
    """[laid rows] cache slots; -1: padding."""
    source: Tensor | None
    """[laid rows] row of the pass; None: the pass's rows in their order."""
    back: Tensor | None
    """[rows] place of each of the pass's rows in the layout."""

    def attend(self, qkv: Tensor, spec: QKVSpec, cache: Tensor) -> Tensor:
        """Attended values of the pass's rows. cache: one layer's."""
        if self.source is not None:
            qkv = qkv.index_select(0, self.source)
        sides = store(qkv, spec, cache, self.positions, self.writes)
        found = [part.attend(sides, cache, spec.kv_scales) for part in self.parts]
        attended = found[0] if len(found) == 1 else torch.cat(found)
        return attended if self.back is None else attended.index_select(0, self.back)


def _laid_out(table: RequestTable, spans: Sequence[Span], padding: int) -> _Layout:
    positions, writes = places(table.slots, spans)
    parts = tuple(_parts(spans, table.slots))
    laid = [rows for part in parts for rows in part.laid]
    if not padding and laid == [span.count for span in spans]:
        return _Layout(parts, positions, writes, None, None)
    ways, count = _ways(spans, laid), len(writes)
    source, back = (upload(rows, table.slots.device) for rows in (ways[0], ways[1] + [0] * padding))
    laid_writes = writes.new_full(source.shape, -1).index_copy_(0, back[:count], writes)
    return _Layout(parts, positions.index_select(0, source), laid_writes, source, back)


def _parts(spans: Sequence[Span], slots: Tensor) -> list[_Group | _Packed]:
    """Parts of a layout in the order of the chunks.

    Long chunks that come first are in groups of equal ones, the others together, unless all of them
    begin a prompt and have few lengths.

    slots: [table rows, positions].
    """
    long = list(itertools.takewhile(_is_long, spans))
    parts: list[_Group | _Packed] = [*_groups(long, 0)]
    rest, first = spans[len(long) :], sum(rows for part in parts for rows in part.laid)
    groups = [] if any(span.start for span in rest) else _groups(rest, first)
    if rest and not 0 < len(groups) <= MAX_CALLS:
        return [*parts, _packed(rest, first, slots)]
    return parts + groups


def _is_long(span: Span) -> bool:
    return not span.start and span.count >= MAX_SHARED_ROWS


def _groups(spans: Sequence[Span], first: int) -> list[_Group]:
    """Groups of equal chunks, in powers of two: each number of members is a shape, too."""
    groups: list[_Group] = []
    for rows, equal in itertools.groupby(filled(span.count) for span in spans):
        left = len(list(equal))
        while left:
            members = 1 << left.bit_length() - 1
            groups.append(_Group(first, rows, members))
            first += members * rows
            left -= members
    return groups


def _packed(spans: Sequence[Span], first: int, slots: Tensor) -> _Packed:
    stops = [span.start + span.count for span in spans]
    bounds = Bounds([span.count for span in spans], stops, slots.device)
    if not any(span.start for span in spans):
        return _Packed(first, bounds)
    seen = [slots[span.row, :stop] for span, stop in zip(spans, stops, strict=True)]
    return _Packed(first, bounds, torch.cat(seen))


def _ways(spans: Sequence[Span], laid: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each row of the layout the pass's row, and for each row of the pass its place."""
    # chunks of 3 and 2 rows, padded to 4 each:
    #
    #   the pass        0 1 2   3 4           back      0 1 2   4 5
    #   the layout      0 1 2 3   4 5 6 7     source    0 1 2 2   3 4 4 4   the last row again
    source: list[int] = []
    back: list[int] = []
    for span, rows in zip(spans, laid, strict=True):
        first, last = len(back), len(back) + span.count - 1
        back += range(len(source), len(source) + span.count)
        source += range(first, last + 1)
        source += [last] * (rows - span.count)
    return source, back

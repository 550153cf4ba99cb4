"""One model's keys and values over the shared request table, and the attention of one pass."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.drafters.drafter import Span
from peagle.engine.batch import Rows, gather_rows, tile_rows
from peagle.engine.request_table import RequestTable
from peagle.models.decoder import Attend
from peagle.models.spec import DecoderSpec
from peagle.ops import cached_attention
from peagle.ops.attention import attend, causal_bias, paged_attention, write_kv
from peagle.ops.cached_attention import AttentionHeads, PassRows


def kv_bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one position takes in one model."""
    numbers = sum(2 * group.attention.kv_width * len(group.layers) for group in spec.groups)
    return numbers * dtype.itemsize


class KVCache:
    """Every layer's keys and values; layers whose keys are of one shape share a tensor.

    The last slot is the request table's null slot.
    """

    def __init__(
        self, spec: DecoderSpec, table: RequestTable, slots: int, dtype: torch.dtype
    ) -> None:
        self._table = table
        attention = [layer.attention for layer in spec.layers]
        shapes = [(each.num_kv_heads, each.head_dim) for each in attention]
        self._tensors = {
            shape: torch.zeros(
                shapes.count(shape), 2, slots + 1, *shape, dtype=dtype, device=table.slots.device
            )
            for shape in dict.fromkeys(shapes)
        }
        layers = {shape: iter(tensor) for shape, tensor in self._tensors.items()}
        self._layers = [next(layers[shape]) for shape in shapes]
        """Each layer's, [2, slots + 1, kv_heads, head_dim]."""
        self._alike = len(self._tensors) == 1 and all(each.full for each in attention)

    @property
    def tensor(self) -> Tensor:
        """All layers' [layers, 2, slots + 1, kv_heads, head_dim], where they are of one shape."""
        [tensor] = self._tensors.values()
        return tensor

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks: attention gives hidden positions a weight of 0, which NaN survives."""
        size = self._table.block_size
        for block in blocks:
            for tensor in self._tensors.values():
                tensor[:, :, block * size : (block + 1) * size] = 0

    def open(self, spans: Sequence[Span]) -> tuple[Tensor, Attend]:
        """Positions [rows] of some spans, in order, and the attention of one pass over them."""
        if not self._alike:
            tiles = tile_rows(self._table, spans)
            return tiles.positions, TiledAttend(self._layers, tiles)
        if len(spans) == 1:
            run = self._table.contiguous_from(spans[0].row)
            if run is not None:
                attention = ContiguousAttend(self.tensor, run, spans[0])
                return attention.positions, attention
        rows = gather_rows(self._table, spans, self.tensor.dtype)
        return rows.positions, PagedAttend(self._layers, rows)


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

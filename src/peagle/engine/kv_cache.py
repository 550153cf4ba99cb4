"""One model's keys and values, in blocks of slots."""

import math
import mmap
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from peagle.engine.block_groups import WHOLE, GroupBlock
from peagle.engine.request_table import RequestTable, SlotTable
from peagle.models.spec import DecoderSpec
from peagle.ops.cached_attention import PassRows
from peagle.ops.weight import E4M3


def kv_dtype(asked: str, dtype: torch.dtype) -> torch.dtype:
    """The type of a cache, as `EngineConfig.kv_cache_dtype` asks for it; dtype: the model's."""
    return E4M3 if asked.startswith("fp8") else dtype


def kv_bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one position takes in one model, seen by all of its layers."""
    return sum(kv_bytes_by_window(spec, dtype).values())


def kv_bytes_by_window(spec: DecoderSpec, dtype: torch.dtype) -> dict[int | None, int]:
    """The same by the window of the layers that see it; None: those that see all of a context."""
    found: dict[int | None, int] = {}
    for attention in spec.attention.values():
        numbers = 2 * attention.kv_width
        found[attention.window] = found.get(attention.window, 0) + numbers * dtype.itemsize
    return found


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, of which a CPU takes no memory before they are written."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform == "win32" or not size:
        return torch.zeros(*shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


class KVCache:
    """Every layer's keys and values; layers that are alike in these share a tensor.

    The last slot of each tensor is the null slot of the table that its layers go by.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        table: RequestTable,
        slots: int,
        dtype: torch.dtype,
        windows: Mapping[int, SlotTable] | None = None,
        kept: torch.dtype | None = None,
    ) -> None:
        """slots: of layers that keep whole contexts, besides the null slot; dtype: of what is
        written and read; windows: the tables of layers that do not keep whole contexts; kept: the
        type in which they lie here; None: the same."""
        self.table, self._windows, self.dtype = table, windows or {}, dtype
        kept = kept or dtype
        self.narrow = kept != dtype
        """Whether keys and values are rounded when they are written (`ops.kv_dtype`)."""
        self.full = all(heads.full for heads in spec.attention.values())
        """Whether no layer has a window or sinks."""
        kinds = {
            layer: (self._group(heads.window), heads.num_kv_heads, heads.head_dim)
            for layer, heads in spec.attention.items()
        }
        sizes = [slots, *(window.null_slot for window in self._windows.values())]
        self._tensors = {
            kind: zeros((count, 2, sizes[kind[0]] + 1, *kind[1:]), kept, table.slots.device)
            for kind, count in Counter(kinds.values()).items()
        }
        layers = {kind: iter(tensor) for kind, tensor in self._tensors.items()}
        self.layers = {layer: next(layers[kind]) for layer, kind in kinds.items()}
        """By the place of a layer among all, [2, slots + 1, kv_heads, head_dim]."""

    @property
    def alike(self) -> bool:
        """Whether all layers share a tensor."""
        return len(self._tensors) == 1

    @property
    def tensor(self) -> Tensor:
        """All layers' [layers, 2, slots + 1, kv_heads, head_dim], where they share one."""
        [tensor] = self._tensors.values()
        return tensor

    @property
    def tensors(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Layers [layers, 2, slots + 1, kv_heads, head_dim], and the slots [table rows, positions]
        that they go by."""
        tables = [self.table.slots, *(window.slots for window in self._windows.values())]
        return ((tensor, tables[group]) for (group, *_), tensor in self._tensors.items())

    def rows_for(self, window: int | None, rows: PassRows) -> PassRows:
        """A pass's rows, which go by the slots of whole contexts, for layers with this window."""
        table = None if window is None else self._windows.get(window)
        return rows if table is None else rows.through(table.slots)

    def clear(self, blocks: Sequence[GroupBlock]) -> None:
        """Zero some blocks: attention gives hidden positions a weight of 0, which NaN survives."""
        size = self.table.block_size
        for group, block in blocks:
            for kind, tensor in self._tensors.items():
                if kind[0] == group:
                    tensor[:, :, block * size : (block + 1) * size] = 0

    def _group(self, window: int | None) -> int:
        """The group of layers with this window, as `block_groups` counts."""
        if window is None or window not in self._windows:
            return WHOLE
        return WHOLE + 1 + list(self._windows).index(window)

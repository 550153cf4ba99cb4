"""One model's keys and values, in blocks of slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.request_table import RequestTable
from peagle.models.spec import DecoderSpec


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
        attention = [layer.attention for layer in spec.layers]
        shapes = [(each.num_kv_heads, each.head_dim) for each in attention]
        self._tensors = {
            shape: torch.zeros(
                shapes.count(shape), 2, slots + 1, *shape, dtype=dtype, device=table.slots.device
            )
            for shape in dict.fromkeys(shapes)
        }
        layers = {shape: iter(tensor) for shape, tensor in self._tensors.items()}
        self.layers = [next(layers[shape]) for shape in shapes]
        """Each layer's, [2, slots + 1, kv_heads, head_dim]."""
        self._block_size = table.block_size

    @property
    def alike(self) -> bool:
        """Whether all layers' keys are of one shape."""
        return len(self._tensors) == 1

    @property
    def tensor(self) -> Tensor:
        """All layers' [layers, 2, slots + 1, kv_heads, head_dim], where they are of one shape."""
        [tensor] = self._tensors.values()
        return tensor

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks: attention gives hidden positions a weight of 0, which NaN survives."""
        size = self._block_size
        for block in blocks:
            for tensor in self._tensors.values():
                tensor[:, :, block * size : (block + 1) * size] = 0

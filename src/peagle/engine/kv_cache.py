"""One model's keys and values, in blocks of slots."""

from collections.abc import Sequence

import torch

from peagle.engine.request_table import RequestTable
from peagle.models.spec import DecoderSpec


def kv_bytes_per_token(spec: DecoderSpec, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one position takes in one model."""
    numbers = sum(2 * group.attention.kv_width * len(group.layers) for group in spec.groups)
    return numbers * dtype.itemsize


class KVCache:
    """Every layer's cache in one `tensor` [layers, 2, slots + 1, kv_heads, head_dim].

    The last slot is the request table's null slot.
    """

    def __init__(
        self, spec: DecoderSpec, table: RequestTable, slots: int, dtype: torch.dtype
    ) -> None:
        """All groups of a spec's layers must have keys of one shape."""
        [shape] = {(g.attention.num_kv_heads, g.attention.head_dim) for g in spec.groups}
        self.tensor = torch.zeros(
            len(spec.layers), 2, slots + 1, *shape, dtype=dtype, device=table.slots.device
        )
        self._block_size = table.block_size

    def clear(self, blocks: Sequence[int]) -> None:
        """Zero some blocks: attention gives hidden positions a weight of 0, which NaN survives."""
        size = self._block_size
        for block in blocks:
            self.tensor[:, :, block * size : (block + 1) * size] = 0

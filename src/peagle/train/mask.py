"""Which keys each query sees, in closed form (P-EAGLE, arXiv 2602.01469)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.transfer import to_device

BLOCK = 128
"""Number of queries, and of keys, in a block of a FlexAttention mask."""
Tile = tuple[slice, Tensor, Tensor]
"""Queries, their keys [keys], and [queries, keys] bool: which keys each query sees."""
Blocks = NDArray[np.bool_]
"""[query blocks, key blocks]. In NumPy, whose calls cost a tenth of torch's at this size."""
KINDS = ("kv", "q", "full_kv", "full_q")
"""FlexAttention's lists of blocks: partly and fully visible, by query and by key."""


def rows_in_step(device: torch.device) -> int:
    """The number that queries and keys come in multiples of: FlexAttention needs whole blocks."""
    return BLOCK if device.type == "cuda" else 1


@dataclass(frozen=True)
class Visibility:
    """Two intervals of keys for every query; nothing of size queries x keys. On the CPU.

    An element sees the depth-0 elements of its document up to its own anchor, and the shallower
    elements of its own chain, or all of it. With elements sorted by anchor and then depth, both are
    intervals: one of the context's keys, one of the queries' own keys, which follow those.
    """

    #            context keys       own keys
    # (a, 1)     ■ ■ ■ · · ·        ■ · · ·
    # (a, 2)     ■ ■ ■ · · ·        ■ ■ · ·
    # (b, 1)     ■ ■ ■ ■ ■ ·        · · ■ ·
    # (b, 2)     ■ ■ ■ ■ ■ ·        · · ■ ■
    context: int
    """Number of context keys."""
    first: Tensor
    """[queries] first context key."""
    last: Tensor
    """[queries] last context key; before the first if there is none."""
    own: tuple[Tensor, ...] = ()
    """[queries] first and last own key, counted from the first query's. None of both: the queries'
    keys are the context's."""

    @property
    def queries(self) -> int:
        """Number of queries."""
        return self.first.shape[0]

    @property
    def keys(self) -> int:
        """Number of keys of both kinds."""
        return self.context + (self.queries if self.own else 0)

    def tiles(self) -> Iterator[Tile]:
        """Tiles of queries, with the keys that any of them sees: the plain twin of `block_mask`."""
        for start in range(0, self.queries, BLOCK):
            rows = slice(start, min(start + BLOCK, self.queries))
            first, last = self.first[rows, None], self.last[rows, None]
            keys = torch.arange(int(first.min()), max(int(last.max()), int(first.min()) - 1) + 1)
            seen = (first <= keys) & (keys <= last)
            if self.own:
                first, last = (part[rows, None] for part in self.own)
                own = torch.arange(int(first.min()), int(last.max()) + 1)
                seen = torch.cat((seen, (first <= own) & (own <= last)), dim=1)
                keys = torch.cat((keys, own + self.context))
            yield rows, keys, seen

    def block_mask(self, device: torch.device) -> Any:
        """FlexAttention's mask, with its blocks found from the intervals."""
        from torch.nn.attention.flex_attention import BlockMask

        full, partial = self._blocks()
        listed = [_listed(b) for blocks in (partial, full) for b in (blocks, blocks.T)]
        indices = [part[None, None] for pair in listed for part in pair]
        ends = (self.first, self.last, *(part + self.context for part in self.own))
        moved = to_device(device, *indices, *(part.int() for part in ends))
        names = [f"{kind}_{part}" for kind in KINDS for part in ("num_blocks", "indices")]
        lists: dict[str, Any] = dict(zip(names, moved, strict=False))
        return BlockMask(
            seq_lengths=(self.queries, self.keys),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=_rule(*moved[len(names) :]),
            **lists,
        )

    def _blocks(self) -> tuple[Blocks, Blocks]:
        """Fully visible blocks, and partly visible ones."""
        begin = np.arange(0, self.keys, BLOCK)
        end = begin + BLOCK - 1
        first, last = _by_block(self.first), _by_block(self.last)
        full = (begin >= first.max(1, keepdims=True)) & (end <= last.min(1, keepdims=True))
        seen = (end >= first.min(1, keepdims=True)) & (begin <= last.max(1, keepdims=True))
        if self.own:
            first, last = (_by_block(part) + self.context for part in self.own)
            seen |= (end >= first.min(1, keepdims=True)) & (begin <= last.max(1, keepdims=True))
        return full, seen & ~full


def _rule(first: Tensor, last: Tensor, *own: Tensor) -> Any:
    """FlexAttention's rule for the pairs of a block that is partly visible."""
    if not own:
        return lambda b, h, q, k: (first[q] <= k) & (k <= last[q])
    begin, end = own

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((first[q] <= k) & (k <= last[q])) | ((begin[q] <= k) & (k <= end[q]))

    return rule


def _by_block(values: Tensor) -> NDArray[np.int64]:
    """[rows] -> [blocks, BLOCK], the last row repeated."""
    found = values.numpy()
    # a row that comes twice changes neither the least nor the largest of its block
    last = np.repeat(found[-1:], -len(found) % BLOCK)
    return np.concatenate((found, last)).reshape(-1, BLOCK)


def _listed(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """For each row, the number of set columns, and their indices first. int32"""
    row, column = np.nonzero(blocks)
    count = np.bincount(row, minlength=len(blocks))
    columns = np.zeros(blocks.shape, np.int32)
    columns[row, np.arange(len(row)) - (count.cumsum() - count)[row]] = column
    return torch.from_numpy(count.astype(np.int32)), torch.from_numpy(columns)

"""Which cache slot holds each position of each request, on the device."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.engine.block_groups import WHOLE
from peagle.engine.step import BlockUpdate, Step
from peagle.transfer import upload


@dataclass(frozen=True)
class SlotTable:
    """Where the keys and values of one group of layers are."""

    slots: Tensor
    """[rows, max_length] the cache slot of every position of every running request."""
    null_slot: int
    """The slot of positions that have none, whose KV stays finite. It follows all others."""


class RequestTable:
    """`slots` [rows, max_length]: the cache slot of every position of every running request.

    `limits` [rows]: how many positions of each row have one. The others hold the null slot: a batch
    reads as much of every request as the longest one has. Layers with a window go by `windows`,
    where positions have no slot any more that no row sees.
    """

    def __init__(
        self,
        rows: int,
        max_length: int,
        block_size: int,
        device: torch.device,
        null_slot: int = 0,
        windows: Mapping[int, int] | None = None,
    ) -> None:
        """windows: the null slot of each window's table."""
        self.block_size = block_size
        shape = (rows, -(-max_length // block_size) * block_size)

        def empty(null_slot: int) -> SlotTable:
            slots = torch.full(shape, null_slot, dtype=torch.int64, device=device)
            return SlotTable(slots, null_slot)

        whole = empty(null_slot)
        self.slots = whole.slots
        self.windows = {window: empty(null) for window, null in (windows or {}).items()}
        self._tables = whole, *self.windows.values()
        """By group."""
        self.limits = torch.zeros(rows, dtype=torch.int64, device=device)
        self._first_blocks: list[int | None] = [None] * rows

    def update(self, step: Step) -> None:
        """Forget the rows that a step's requests left, then record the blocks that they got."""
        for row in step.left:
            self.limits[row].fill_(0)  # `= 0` would wait for the device
            for table in self._tables:
                table.slots[row].fill_(table.null_slot)
        for group, table in enumerate(self._tables):
            updates = [update for update in step.blocks if update.group == group]
            if updates:
                self._write(table, updates)
        self._note_order(update for update in step.blocks if update.group == WHOLE)

    def forget(self) -> None:
        """Forget all rows."""
        self.limits.zero_()
        self._first_blocks = [None] * len(self._first_blocks)
        for table in self._tables:
            table.slots.fill_(table.null_slot)

    def contiguous_from(self, row: int) -> int | None:
        """The first slot of a request whose positions are contiguous in the cache, else None."""
        block = self._first_blocks[row]
        return None if block is None else block * self.block_size

    def context(self, rows: Tensor, stops: Tensor, length: int) -> Tensor:
        """Slots of the first `length` positions of some requests: [requests, length].

        Those from a request's stop on are the null slot: its blocks may hold anything there.
        """
        own = torch.arange(length, device=rows.device) < stops[:, None]
        return torch.where(own, self.slots[rows, :length], self._tables[WHOLE].null_slot)

    def _note_order(self, updates: Iterable[BlockUpdate]) -> None:
        for _, row, place, block in updates:
            first = self._first_blocks[row] if place else block
            in_order = first is not None and block == first + place
            self._first_blocks[row] = first if in_order else None

    def _write(self, table: SlotTable, updates: Iterable[BlockUpdate]) -> None:
        """In one copy, however many requests have grown.

        What a GPU would take several launches for is worked out here: each costs the host more.
        """
        size, (_, width) = self.block_size, table.slots.shape
        found = [(row, place, -1 if block is None else block) for _, row, place, block in updates]
        rows, firsts, slots = (np.array(found) * (1, size, size)).T
        offsets = np.arange(size)
        places = (rows * width + firsts)[:, None] + offsets
        held = np.where(slots[:, None] < 0, table.null_slot, slots[:, None] + offsets)
        numbers = places.ravel(), held.ravel(), rows, firsts + size
        flat = upload(torch.from_numpy(np.concatenate(numbers)), table.slots.device)
        at, values, owners, limits = flat.split([len(part) for part in numbers])
        table.slots.view(-1).index_copy_(0, at, values)
        if table.slots is self.slots:
            self.limits.scatter_reduce_(0, owners, limits, "amax")

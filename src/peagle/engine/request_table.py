"""Which cache slot holds each position of each request, on the device."""

from collections.abc import Iterable

import torch
from torch import Tensor

from peagle.engine.step import Step
from peagle.transfer import upload


class RequestTable:
    """`slots` [rows, max_length]: the cache slot of every position of every running request.

    `limits` [rows]: how many positions of each row have one. The others hold `null_slot`, whose KV
    stays finite: a batch reads as much of every request as the longest one has.
    """

    def __init__(
        self,
        rows: int,
        max_length: int,
        block_size: int,
        device: torch.device,
        null_slot: int = 0,
    ) -> None:
        self.block_size = block_size
        blocks = -(-max_length // block_size)
        self._null_slot = null_slot
        shape = (rows, blocks * block_size)
        self.slots = torch.full(shape, null_slot, dtype=torch.int64, device=device)
        self.limits = torch.zeros(rows, dtype=torch.int64, device=device)
        self._offsets = torch.arange(block_size, device=device)
        self._first_blocks: list[int | None] = [None] * rows

    def update(self, step: Step) -> None:
        """Forget the rows that a step's requests left, then record the blocks that they got."""
        for row in step.left:
            self.limits[row].fill_(0)  # `= 0` would wait for the device
            self.slots[row].fill_(self._null_slot)
        if step.blocks:
            self._note_order(step.blocks)
            self._write(step.blocks)

    def forget(self) -> None:
        """Forget all rows."""
        self.limits.zero_()
        self.slots.fill_(self._null_slot)

    def contiguous_from(self, row: int) -> int | None:
        """The first slot of a request whose positions are contiguous in the cache, else None."""
        block = self._first_blocks[row]
        return None if block is None else block * self.block_size

    def context(self, rows: Tensor, stops: Tensor, length: int) -> Tensor:
        """Slots of the first `length` positions of some requests: [requests, length].

        Those from a request's stop on are the null slot: its blocks may hold anything there.
        """
        own = torch.arange(length, device=rows.device) < stops[:, None]
        return torch.where(own, self.slots[rows, :length], self._null_slot)

    def _note_order(self, blocks: Iterable[tuple[int, int, int]]) -> None:
        for row, index, block in blocks:
            first = self._first_blocks[row] if index else block
            in_order = first is not None and block == first + index
            self._first_blocks[row] = first if in_order else None

    def _write(self, found: tuple[tuple[int, int, int], ...]) -> None:
        """In one copy, however many requests have grown."""
        rows, indices, blocks = upload(found, self.slots.device).unbind(1)
        places = indices[:, None] * self.block_size + self._offsets
        self.slots[rows[:, None], places] = blocks[:, None] * self.block_size + self._offsets
        self.limits.scatter_reduce_(0, rows, places[:, -1] + 1, "amax")

"""A stable device row for each live request: which cache slot holds each of its positions."""

import torch
from torch import Tensor

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
        self._free = list(range(rows - 1, -1, -1))
        self._first_blocks: list[int | None] = [None] * rows
        self._unwritten: list[tuple[int, int, int]] = []
        """(row, block index, block) that the device's tables do not hold yet."""

    @property
    def free_rows(self) -> int:
        """Requests that could still be admitted."""
        return len(self._free)

    def admit(self) -> int:
        """A free row."""
        return self._free.pop()

    def leave(self, row: int) -> None:
        """Free a row."""
        self._unwritten = [place for place in self._unwritten if place[0] != row]
        self._free.append(row)
        self.limits[row].fill_(0)  # `= 0` would wait for the device
        self.slots[row].fill_(self._null_slot)

    def append(self, row: int, position: int, blocks: list[int]) -> None:
        """Record the blocks that hold a request from `position` on, the first one of a block."""
        index = position // self.block_size
        first = self._first_blocks[row] if index else blocks[0]
        in_order = first is not None and blocks == list(
            range(first + index, first + index + len(blocks))
        )
        self._first_blocks[row] = first if in_order else None
        self._unwritten += [(row, index + i, block) for i, block in enumerate(blocks)]

    def flush(self) -> None:
        """Bring the device up to date, in one copy however many requests have grown."""
        if not self._unwritten:
            return
        rows, indices, blocks = upload(self._unwritten, self.slots.device).unbind(1)
        self._unwritten.clear()
        places = indices[:, None] * self.block_size + self._offsets
        self.slots[rows[:, None], places] = blocks[:, None] * self.block_size + self._offsets
        self.limits.scatter_reduce_(0, rows, places[:, -1] + 1, "amax")

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

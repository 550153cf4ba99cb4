"""Rows of the request table: which are free, and what a worker has not been told of the others."""

from collections.abc import Sequence

from peagle.engine.step import BlockUpdate


class RowPool:
    """A row for each running request."""

    def __init__(self, rows: int) -> None:
        self._free = list(range(rows - 1, -1, -1))
        self._left: list[int] = []
        self._blocks: list[BlockUpdate] = []

    @property
    def free_rows(self) -> int:
        """Requests that could still be admitted."""
        return len(self._free)

    def admit(self) -> int:
        """A free row."""
        return self._free.pop()

    def append(self, row: int, group: int, place: int, blocks: Sequence[int | None]) -> None:
        """Note the blocks of a group that hold a request from its block `place` on."""
        self._blocks += [
            BlockUpdate(group, row, place + i, block) for i, block in enumerate(blocks)
        ]

    def leave(self, row: int) -> None:
        """Free a row."""
        self._free.append(row)
        self._left.append(row)

    def news(self) -> tuple[tuple[int, ...], tuple[BlockUpdate, ...]]:
        """What changed since the last call: `Step.left` and `Step.blocks`."""
        told = tuple(self._left), tuple(self._blocks)
        self._left, self._blocks = [], []
        return told

"""Accuracy per depth and acceptance length, estimated on held-out chains without an engine."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.train.cod import Elements


@dataclass(frozen=True)
class Estimate:
    """How good a drafter is on text that it was not trained on."""

    accuracy: tuple[float, ...]
    """Share of charged elements of each depth at which drafter and target agree."""
    acceptance_length: float
    """Mean tokens a cycle emits when decoding walks through the text, as an engine does."""


class Agreement:
    """Collects, anchor by anchor and depth by depth, whether drafter and target agree."""

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._right = torch.zeros(depths)
        self._seen = torch.zeros(depths)
        self._emitted = 0
        self._cycles = 0
        self._table: Tensor | None = None

    def begin(self, length: int) -> None:
        """Start a batch of so many tokens."""
        self._close()
        self._table = torch.full((length, self._depths), -1, dtype=torch.int8)

    def add(self, elements: Elements, agrees: Tensor) -> None:
        """Record a pass; agrees: [elements]."""
        assert self._table is not None
        self._table[elements.anchors, elements.depths] = agrees.to("cpu", torch.int8)

    def estimate(self) -> Estimate:
        """What all batches so far say."""
        self._close()
        accuracy = (self._right / self._seen.clamp(min=1)).tolist()
        return Estimate(tuple(accuracy), self._emitted / self._cycles if self._cycles else 1.0)

    def _close(self) -> None:
        if self._table is None:
            return
        table, self._table = self._table, None
        self._right += (table == 1).sum(dim=0)
        self._seen += (table >= 0).sum(dim=0)
        emitted = table.clamp(min=0).cumprod(dim=-1).sum(dim=-1) + 1
        emitted[(table < 0).any(dim=-1)] = 0
        self._walk(emitted.tolist())

    def _walk(self, emitted: list[int]) -> None:
        """Go from cycle to cycle; where no whole chain is charged (0), a token at a time."""
        anchor = 0
        while anchor < len(emitted):
            self._emitted += emitted[anchor]
            self._cycles += emitted[anchor] > 0
            anchor += max(emitted[anchor], 1)

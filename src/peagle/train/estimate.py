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
    """Mean of 1 + the length of the agreeing prefix, over anchors whose whole chain is charged."""


class Agreement:
    """Collects, anchor by anchor and depth by depth, whether drafter and target agree."""

    def __init__(self, depths: int) -> None:
        self._depths = depths
        self._right = torch.zeros(depths)
        self._seen = torch.zeros(depths)
        self._emitted = 0.0
        self._chains = 0
        self._table: Tensor | None = None

    def begin(self, tokens: Tensor) -> None:
        """Start a batch of packed rows [batch, length]."""
        self._close()
        shape = (*tokens.shape, self._depths)
        self._table = torch.full(shape, -1, dtype=torch.int8, device=tokens.device)

    def add(self, elements: Elements, agrees: Tensor) -> None:
        """Record a pass; agrees: [charged elements], in the order of `elements.charged`."""
        assert self._table is not None
        row, column = elements.charged.nonzero(as_tuple=True)
        anchor, depth = elements.anchors[row, column], elements.depths[row, column]
        self._table[row, anchor, depth] = agrees.to(torch.int8)

    def estimate(self) -> Estimate:
        """What all batches so far say."""
        self._close()
        accuracy = (self._right / self._seen.clamp(min=1)).tolist()
        return Estimate(tuple(accuracy), 1.0 + self._emitted / max(self._chains, 1))

    def _close(self) -> None:
        if self._table is None:
            return
        table, self._table = self._table, None
        self._right += (table == 1).sum(dim=(0, 1)).cpu()
        self._seen += (table >= 0).sum(dim=(0, 1)).cpu()
        chains = table[(table >= 0).all(dim=-1)].long()
        self._emitted += float(chains.cumprod(dim=-1).sum())
        self._chains += len(chains)

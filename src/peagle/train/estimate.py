"""Accuracy per depth and acceptance length, estimated on held-out chains without an engine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Estimate:
    """How good a drafter is on text that it was not trained on."""

    accuracy: tuple[float, ...]
    """Share of each depth's elements at which drafter and target agree."""
    acceptance_length: float
    """Mean tokens that a cycle emits when decoding walks through the text, as an engine does."""
    drawn_accuracy: tuple[float, ...]
    """At temperature 1: mean probability at each depth that both draw the same token."""
    drawn_acceptance_length: float
    """The same walk at temperature 1, as if the text were drawn."""

    @classmethod
    def of(cls, tables: Iterable[tuple[Tensor, Tensor]]) -> Self:
        """From tables [anchors, depths] of agreement (1 agreed, 0 did not), and of the probability
        of drawing the same; below 0 where nothing was asked."""
        agreement, drawn = zip(*tables, strict=True)
        lengths = walked_length(agreement), walked_length(drawn)
        return cls(_means(agreement), lengths[0], _means(drawn), lengths[1])


def _means(tables: Sequence[Tensor]) -> tuple[float, ...]:
    """Mean of each depth's elements."""
    right = torch.stack([table.clamp(min=0).double().sum(dim=0) for table in tables]).sum(dim=0)
    asked = torch.stack([(table >= 0).sum(dim=0) for table in tables]).sum(dim=0)
    return tuple((right / asked.clamp(min=1)).tolist())


def walked_length(tables: Iterable[Tensor]) -> float:
    """Expected tokens over expected cycles of a walk through the anchors of tables, in order.

    tables: [anchors, depths] the probability that each draft is accepted after accepted ones, which
    is 0 or 1 where nothing is drawn. An
    anchor begins a cycle as often as the cycles before it end just there; where no whole chain was
    asked, the walk advances by one token, which no cycle counts.
    """
    tokens = begun = 0.0
    for table in tables:
        reached = F.pad(table.double().clamp(min=0).cumprod(dim=1), (1, 0), value=1.0)
        ends = (reached - F.pad(reached[:, 1:], (0, 1))).tolist()
        lengths, asked = reached.sum(dim=1).tolist(), (table >= 0).all(dim=1).tolist()
        visits = [1.0] + [0.0] * (len(table) + table.shape[1])
        for anchor, (shares, length, whole) in enumerate(zip(ends, lengths, asked, strict=True)):
            for accepted, share in enumerate(shares if whole else [1.0]):
                visits[anchor + accepted + 1] += visits[anchor] * share
            tokens += visits[anchor] * length * whole
            begun += visits[anchor] * whole
    return tokens / begun if begun else 1.0

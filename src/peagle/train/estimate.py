"""Accuracy per depth and acceptance length, estimated on held-out chains without an engine."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """How good a drafter is on text that it was not trained on."""

    accuracy: tuple[float, ...]
    """Share of each depth's elements at which drafter and target agree."""
    acceptance_length: float
    """Mean tokens that a cycle emits when decoding walks through the text, as an engine does."""

    @classmethod
    def of(cls, agreement: Iterable[Tensor]) -> Self:
        """From tables [anchors, depths]: 1 agreed, 0 did not, -1 was not asked."""
        tables = list(agreement)
        right = torch.stack([(table == 1).sum(dim=0) for table in tables]).sum(dim=0)
        asked = torch.stack([(table >= 0).sum(dim=0) for table in tables]).sum(dim=0)
        emitted = [tokens for table in tables for tokens in cycles(table)]
        length = sum(emitted) / len(emitted) if emitted else 1.0
        return cls(tuple((right / asked.clamp(min=1)).tolist()), length)


def cycles(agreement: Tensor) -> list[int]:
    """Tokens that each cycle emits when decoding walks through the anchors of a table, in order.

    Where no whole chain was asked, the walk advances by one token, which no cycle counts.
    """
    emitted = agreement.clamp(min=0).cumprod(dim=-1).sum(dim=-1) + 1
    emitted[(agreement < 0).any(dim=-1)] = 0
    lengths, found, anchor = emitted.tolist(), [], 0
    while anchor < len(lengths):
        if lengths[anchor]:
            found.append(lengths[anchor])
        anchor += max(lengths[anchor], 1)
    return found

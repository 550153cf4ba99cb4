"""The temperatures at which drafts are drawn, fitted while running."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.ops.race import FACTORS

KEPT = 1 - 1 / 2000
"""What a count keeps at each later observation: some 2,000 of them decide."""
FIRST_CHOICE = FACTORS.index(0.85)
"""Drafters are a little flatter than their targets."""


class DraftTemperatures:
    """Which of `FACTORS` multiplies a request's temperature for its drafts, at each depth.

    At each draft that the target came to on accepted ones, its own choice is known, and so is what
    every factor would have drafted there: none has to be tried to know how often it is right. The
    choice changes how many drafts are accepted, never a token.
    """

    def __init__(self, device: torch.device) -> None:
        self._right = torch.zeros(0, len(FACTORS), device=device)

    def choose(self, depths: int) -> Tensor:
        """[depths] index into `FACTORS` of the one that is right most often."""
        return self._counts(depths).argmax(dim=1)

    def record(self, alternatives: Tensor, chosen: Sequence[int]) -> None:
        """Count a cycle of one request.

        alternatives: [drafts, factors] what each factor would have drafted; chosen: the target's
        tokens, as many as are known to follow accepted drafts.
        """
        known = min(len(chosen), len(alternatives))
        tokens = torch.tensor(chosen[:known], device=alternatives.device)
        counts = self._counts(known)
        counts.mul_(KEPT).add_(alternatives[:known] == tokens[:, None])

    def _counts(self, depths: int) -> Tensor:
        """[depths, factors] how often each was right, as much as is remembered."""
        missing = depths - len(self._right)
        if missing > 0:
            fresh = self._right.new_zeros(missing, len(FACTORS))
            fresh[:, FIRST_CHOICE] = 1.0
            self._right = torch.cat((self._right, fresh))
        return self._right[:depths]

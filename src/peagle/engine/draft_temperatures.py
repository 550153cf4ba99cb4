"""The temperatures at which drafts are drawn, fitted while running."""

import torch
from torch import Tensor

from peagle.ops.drafts import Drafts, record
from peagle.ops.race import Race
from peagle.ops.sampling import Sampling

FACTORS = (0.0, 0.5, 0.7, 0.85, 1.0, 1.2)
"""What a request's temperature may be multiplied by for its drafts; 0: the likeliest candidate."""
FIRST_CHOICE = FACTORS.index(0.85)
"""Drafters are a little flatter than their targets."""


class DraftTemperatures:
    """Which of `FACTORS` multiplies a request's temperature for its drafts, at each depth.

    At each draft that the target came to on accepted ones, its own choice is known, and so is what
    every factor would have drafted there: none has to be tried to know how often it is right. The
    choice changes how many drafts are accepted, never a token. All of it stays on the device.
    """

    def __init__(self, depths: int, device: torch.device) -> None:
        self._factors = torch.tensor(FACTORS, device=device)
        self._right = torch.zeros(depths, len(FACTORS), device=device)
        """How often each was right, as much as is remembered."""
        self._right[:, FIRST_CHOICE] = 1.0
        self.chosen = torch.full((depths,), FIRST_CHOICE, device=device)
        """[depths] index into `FACTORS` of the one that is right most often."""

    def race(self, sampling: Sampling, newest: Tensor, requests: Tensor) -> Race:
        """The draws that drafts are for. Arguments as in `Race`."""
        return Race(sampling, newest, requests, self._factors, self.chosen)

    def record(self, drafts: Drafts, chosen: Tensor) -> None:
        """Learn from a cycle. drafts: [requests, drafts]; chosen: [requests, drafts + 1], what the
        target takes after each prefix."""
        if drafts.alternatives is not None and drafts.tokens.shape[1]:
            record(self._right, self.chosen, drafts, chosen)

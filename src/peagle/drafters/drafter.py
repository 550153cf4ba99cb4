"""What the engine's cycle needs from a drafter of either method."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.drafters.resident import ResidentDrafter
from peagle.models.decoder import Attend
from peagle.ops.drafts import Drafts
from peagle.ops.race import Race


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one request, given by its row in the request table."""

    row: int
    start: int
    count: int


class DrafterCache(Protocol):
    """The drafter's KV cache as the engine keeps it."""

    def open(self, spans: Sequence[Span]) -> tuple[Tensor, Attend]:
        """Positions [rows] of some spans, in order, and attention for one pass over them."""
        ...


@dataclass(frozen=True)
class DraftWork:
    """Rows that a drafter has not seen, one span per request, and how many tokens to propose."""

    spans: tuple[Span, ...]
    ks: tuple[int, ...]
    """K of each request; 0 where only keys and values are needed, as in the middle of a prompt."""
    tokens: Tensor
    """[rows] the token after each position."""
    features: Tensor
    """[rows, feature_size] the target's tapped hidden states at each position."""
    race: Race | None = None
    """The draws that drafts are for; None where all requests are greedy."""

    @property
    def active(self) -> list[int]:
        """Which of the requests want drafts."""
        return [index for index, k in enumerate(self.ks) if k > 0]

    def race_of(self, requests: list[int]) -> Race | None:
        """The draws of some of the requests."""
        if self.race is None or len(requests) == len(self.ks):
            return self.race
        return self.race.of(torch.tensor(requests, device=self.tokens.device))


class Drafter(Protocol):
    """Proposes K tokens per request."""

    model: DraftModel

    def propose(self, work: DraftWork, cache: DrafterCache) -> Drafts:
        """Drafts [sum(ks)], request after request."""
        ...

    def resident(self) -> ResidentDrafter:
        """The same for a captured cycle, on state that stays on the device."""
        ...

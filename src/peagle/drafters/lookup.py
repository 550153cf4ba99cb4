"""Drafts looked up in a request's own text, and when to trust them."""

from typing import Self

import torch
from torch import Tensor

from peagle.config import SpeculativeConfig
from peagle.ops.lookup import Found, look_up, weigh

TRUSTED, TRUST = 6, 0.25
"""Tokens of a match that is used before any was verified, and what it is taken to gain: so little
that a few wrong ones are enough."""


class Lookup:
    """Looks drafts up, and learns by the length of the match whether they are better than others.

    No match has to be tried to know how good it is. This changes how many drafts are accepted,
    never a token.
    """

    def __init__(self, shortest: int, longest: int, device: torch.device) -> None:
        """shortest, longest: tokens of a match."""
        self.shortest = shortest
        trusted = torch.arange(longest + 1, device=device) >= min(TRUSTED, longest)
        self._gains = torch.where(trusted, TRUST, -0.01)
        """[longest + 1] tokens that drafts after a match of each length gain over others."""

    @classmethod
    def of(cls, speculation: SpeculativeConfig, device: torch.device) -> Self | None:
        """The lookup that a configuration asks for, if any."""
        lengths = speculation.lookup
        return None if lengths is None else cls(*lengths, device)

    def propose(self, history: Tensor, requests: Tensor, counts: Tensor, drafts: int) -> Found:
        """Drafts [requests, drafts] and which of them to use. Arguments as of `look_up`."""
        return look_up(history, requests, counts, drafts, self.shortest, self._gains)

    def record(self, found: Found, drafts: Tensor, chosen: Tensor, others: Tensor | None) -> None:
        """Learn from a cycle. Arguments as of `weigh`."""
        weigh(self._gains, found, drafts, chosen, others)

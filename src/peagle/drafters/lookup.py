"""Drafts looked up in a request's own text, and when to trust them."""

import torch
from torch import Tensor

from peagle.drafters.proposer import Needs, Proposer, ProposerRows
from peagle.ops.acceptance import Path
from peagle.ops.draft import NO_DRAFT, Draft
from peagle.ops.lookup import look_up, weigh

TRUSTED, TRUST = 6, 0.25
"""Tokens of a match that is used before any was verified, and what it is taken to gain: so little
that a few wrong ones are enough."""
PRICE = 0.5
"""Drafts of a match that must be right for it to be worth a cycle's longer pass."""


class Lookup(Proposer):
    """Drafts what followed a text's last tokens when they stood there before.

    It learns by the length of the match whether drafts are worth it; no match has to be tried to
    know that.
    """

    needs = Needs(history=True)
    learns = True

    def __init__(self, shortest: int, longest: int, device: torch.device) -> None:
        """shortest, longest: tokens of a match."""
        self._shortest = shortest
        trusted = torch.arange(longest + 1, device=device) >= min(TRUSTED, longest)
        # shorter matches are used once they have gained, which shows without using them
        self._gains = torch.where(trusted, TRUST, -0.01)
        """[longest + 1] tokens that drafts after a match of each length gain."""

    def propose(self, rows: ProposerRows) -> Draft:
        """What is found in the requests' texts."""
        found = look_up(*rows.texts, rows.drafts, self._shortest, self._gains)
        return Draft(found.tokens.where(found.used[:, None], NO_DRAFT), source=found)

    def learn(self, draft: Draft, path: Path, followed: Tensor) -> None:
        """Learn what matches gained, by their lengths."""
        if draft.source is None:  # of a cycle in parts, which keeps tokens alone
            return
        lengths = draft.source.lengths.where(followed, 0)
        weigh(self._gains, draft.source._replace(lengths=lengths), path, PRICE)

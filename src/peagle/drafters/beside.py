"""Two proposers together: one that seldom has a draft beside one that always has."""

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter
from peagle.drafters.lookup import Lookup
from peagle.drafters.proposer import Needs, Proposer, ProposerRows
from peagle.ops.acceptance import Path
from peagle.ops.draft import Draft


class Beside(Proposer):
    """A drafter, and in its place a lookup where that has found something that it trusts."""

    learns = True

    def __init__(self, lookup: Lookup, drafter: Drafter) -> None:
        self._lookup, self._drafter = lookup, drafter
        self.needs = Needs(drafter.needs.network, history=True)

    def propose(self, rows: ProposerRows) -> Draft:
        """What is found where it is used, else the drafter's draft."""
        found, drafted = self._lookup.propose(rows), self._drafter.propose(rows)
        assert found.source is not None
        used = found.source.used[:, None]
        return Draft(torch.where(used, found.tokens, drafted.tokens), source=found.source)

    def learn(self, draft: Draft, path: Path, followed: Tensor) -> None:
        self._lookup.learn(draft, path, followed)

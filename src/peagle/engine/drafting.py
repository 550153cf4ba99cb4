"""What an engine drafts with, and what shape its drafts may have."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peagle.drafters.proposer import Needs, Proposer
from peagle.engine.cycle import Accept
from peagle.ops.acceptance import accept
from peagle.set_acceptance import SetAcceptance


@dataclass(frozen=True)
class Drafting:
    """What drafts, and how many drafts a cycle may have."""

    proposer: Proposer | None
    lengths: Sequence[int]
    """The numbers to choose from, ascending, K last; (0,) where nothing drafts."""
    num_tree_nodes: int | None = None
    """Drafts of a request where they branch; 0: they do not, None: as `branching` decides."""
    acceptance: SetAcceptance | None = None
    """Decides which drafts are accepted, for measuring time; None: the target's choices do."""

    @property
    def k(self) -> int:
        """Most drafts along a path."""
        return self.lengths[-1]

    @property
    def needs(self) -> Needs:
        """What is kept for the proposer."""
        return Needs() if self.proposer is None else self.proposer.needs

    def accept(self, rows: int, device: torch.device) -> Accept:
        """What follows the target's choices, for requests in so many table rows."""
        if self.acceptance is not None:
            return self.acceptance.open(rows, device)
        return lambda draft, chosen, _: accept(draft, chosen)

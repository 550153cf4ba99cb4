"""Where an engine's drafts come from, and what shape they may have."""

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.drafters.drafter import Drafter
from peagle.drafters.lookup import Lookup


@dataclass(frozen=True)
class Drafting:
    """What drafts, and how many drafts a cycle may have."""

    drafter: Drafter | None
    lengths: Sequence[int]
    """The numbers to choose from, ascending, K last; (0,) where nothing drafts."""
    synthetic: Sequence[float] | None = None
    """In which share of cycles draft 1, 2 ... is accepted, whatever the target says."""
    lookup: Lookup | None = None
    """Finds drafts in a request's own text, beside the drafter or without one."""
    num_tree_nodes: int | None = None
    """Of drafts that branch; 0: they do not, None: as `peagle.engine.trees` decides."""

    @property
    def k(self) -> int:
        """Most drafts of a cycle."""
        return self.lengths[-1]

"""How many nodes trees of drafts have, with these models and on this device."""

from dataclasses import dataclass

from peagle.config import MOST_TREE_NODES
from peagle.drafters.drafter import Drafter
from peagle.drafters.peagle import ParallelDrafter
from peagle.errors import InputError
from peagle.models.decoder import Decoder

SIBLINGS = 2
"""Nodes above K where nothing is said: on two cores of a CPU more rows take longer than they
give."""


@dataclass(frozen=True)
class TreeChoice:
    """What decides on trees."""

    target: Decoder
    drafter: Drafter | None
    k: int
    captured: bool
    """Whether cycles are, on a GPU."""
    shared: bool
    """Whether lookups or a given acceptance decide on drafts, too."""

    def nodes(self, asked: int | None) -> int:
        """How many nodes a tree has; 0: drafts do not branch.

        asked: None is some more than K on a CPU, where trees are possible. Raises `InputError`
        where they are asked for and are not.
        """
        if asked is None:
            nodes = self.k + SIBLINGS
            return 0 if self.captured or self._hindrance(nodes) is not None else nodes
        hindrance = self._hindrance(asked) if asked else None
        if hindrance is not None:
            raise InputError(f"num_tree_nodes {hindrance}")
        return asked

    def _hindrance(self, nodes: int) -> str | None:
        """Why there are no trees of so many nodes."""
        layers = [layer.attention for layer in self.target.spec.layers]
        window = min((each.window for each in layers if each.window), default=None)
        if not isinstance(self.drafter, ParallelDrafter):
            return "needs a P-EAGLE drafter, whose slots have all candidates"
        if nodes <= self.k:
            return f"{nodes} is not above K = {self.k}; give more, or leave it out"
        if nodes > MOST_TREE_NODES:
            return f"{nodes} is above {MOST_TREE_NODES}"
        if not self.captured and self.target.embed.weight.is_cuda:
            return "needs GPU kernels, and there are none for this model"
        if self.shared:
            return "goes with neither lookups nor synthetic acceptance"
        if not self.captured and not all(each.full for each in layers):
            return "is not supported on a CPU for targets with windows or sinks"
        if window is not None and window <= nodes:
            return f"{nodes} is not below the target's window of {window}"
        if self.target.batch_invariant:  # a key's place among others decides how sums are rounded
            return "does not go with batch_invariant; leave one of them out"
        return None

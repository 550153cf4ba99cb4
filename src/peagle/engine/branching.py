"""Where drafts branch: of which cycles, with these models and on this device."""

from dataclasses import dataclass

from peagle.engine.drafting import Drafting
from peagle.errors import InputError
from peagle.models.decoder import Decoder
from peagle.speculative_config import TREE_NODES


@dataclass(frozen=True)
class Branching:
    """Which cycles have trees in place of chains: those with all K drafts and few requests."""

    k: int
    nodes: int
    """Drafts of each request where they branch; 0: they never do."""
    most_requests: int
    """Requests of a cycle up to which they do."""

    def nodes_for(self, requests: int, drafts: int) -> int:
        """Drafts of each of so many requests in a cycle with so many drafts along a path; 0: these
        are a chain."""
        branches = 0 < requests <= self.most_requests and 0 < drafts == self.k
        return self.nodes if branches else 0


def num_tree_nodes(target: Decoder, drafting: Drafting, *, captured: bool) -> int:
    """How many nodes the trees of K drafts have; 0: drafts do not branch.

    Where nobody has said, it is `TREE_NODES` on a GPU where trees are possible. captured: whether
    cycles are, on a GPU. Raises `InputError` where trees are asked for and are not possible.
    """
    asked = drafting.num_tree_nodes
    unasked = TREE_NODES if captured and target.embed.weight.is_cuda else 0
    nodes = unasked if asked is None else asked
    if not nodes:
        return 0
    hindrance = _of_drafts(drafting, nodes) or _of_target(target, nodes, captured)
    if asked and hindrance is not None:
        raise InputError(f"num_tree_nodes {hindrance}")
    return nodes if hindrance is None else 0


def _of_drafts(drafting: Drafting, nodes: int) -> str | None:
    if drafting.proposer is None or not drafting.proposer.branches:
        return "needs a drafter"
    if drafting.acceptance is not None:
        return "does not go with set acceptance, which goes along a chain"
    if nodes <= drafting.k:
        return f"{nodes} is not above K = {drafting.k}; give more, or leave it out"
    return None


def _of_target(target: Decoder, nodes: int, captured: bool) -> str | None:
    layers = target.spec.attention.values()
    if target.spec.recurrent:
        return "is not supported for targets with recurrent layers"
    window = min((each.window for each in layers if each.window), default=None)
    if not captured and target.embed.weight.is_cuda:
        return "needs GPU kernels, and there are none for this model"
    if not captured and not all(each.full for each in layers):
        return "is not supported on a CPU for targets with windows or sinks"
    if not captured and len({(each.num_kv_heads, each.head_dim) for each in layers}) > 1:
        return "is not supported on a CPU for targets with keys of several shapes"
    if window is not None and window <= nodes:
        return f"{nodes} is not below the target's window of {window}"
    if target.batch_invariant:  # a key's place among others decides how sums are rounded
        return "does not go with batch_invariant; leave one of them out"
    return None

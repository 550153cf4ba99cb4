"""Whether drafts can branch, with these models and on this device."""

from peagle.config import TREE_NODES
from peagle.drafters.drafter import Drafter
from peagle.drafters.peagle import ParallelDrafter
from peagle.errors import InputError
from peagle.models.decoder import Decoder


def tree_nodes(
    target: Decoder,
    drafter: Drafter | None,
    k: int,
    asked: int | None,
    *,
    captured: bool,
    shared: bool,
) -> int:
    """How many nodes the trees of K drafts have; 0: drafts do not branch.

    asked: None is `TREE_NODES` on a GPU where trees are possible; captured: whether cycles are, on
    a GPU; shared: whether lookups or a given acceptance decide on drafts, too. Raises `InputError`
    where trees are asked for and are not possible.
    """
    if asked is None and not (captured and target.embed.weight.is_cuda):
        return 0
    nodes = TREE_NODES if asked is None else asked
    hindrance = _of_drafts(drafter, k, nodes, shared) or _of_target(target, nodes, captured)
    if asked and hindrance is not None:
        raise InputError(f"num_tree_nodes {hindrance}")
    return nodes if hindrance is None else 0


def _of_drafts(drafter: Drafter | None, k: int, nodes: int, shared: bool) -> str | None:
    if not isinstance(drafter, ParallelDrafter):
        return "needs a P-EAGLE drafter, whose slots have all candidates"
    if nodes <= k:
        return f"{nodes} is not above K = {k}; give more, or leave it out"
    return "goes with neither lookups nor synthetic acceptance" if shared else None


def _of_target(target: Decoder, nodes: int, captured: bool) -> str | None:
    layers = [layer.attention for layer in target.spec.layers]
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

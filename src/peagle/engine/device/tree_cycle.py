"""A cycle whose drafts branch: more of them may be right for rows that cost little.

draft    one pass of the drafter; candidates of every slot ─> the likeliest nodes (`ops.tree`)
verify   one pass of the target over all nodes, each of which sees the way that leads to it
accept   the target's choices lead from the root along a path; its keys move together
"""

from dataclasses import replace

from torch import Tensor

from peagle.drafters.peagle import ResidentParallel
from peagle.drafters.resident import CycleShape
from peagle.engine.device.cycle import DeviceCycle, Verified
from peagle.engine.draft_temperatures import DraftTemperatures
from peagle.ops.argmax import argmax
from peagle.ops.cached_attention import PassRows
from peagle.ops.drafts import Drafts
from peagle.ops.penalties import penalize
from peagle.ops.resident import ResidentState, settle
from peagle.ops.sampling import Sampling, sample_requests
from peagle.ops.tree import Tree, compact, find_unbranched, known_alternatives, walk


class TreeCycle:
    """`DeviceCycle.run`, with trees of so many nodes in place of chains."""

    def __init__(self, cycle: DeviceCycle, nodes: int) -> None:
        self._cycle, self._nodes = cycle, nodes

    def run(
        self,
        state: ResidentState,
        requests: Tensor,
        shape: CycleShape,
        sampling: Sampling,
        temperatures: DraftTemperatures,
    ) -> None:
        """Draft, verify and accept for some requests. Arguments as of `DeviceCycle.run`."""
        race = temperatures.race(sampling, state.computed, requests)
        drafter, unbranched = self._cycle.drafter, find_unbranched(state, requests, self._nodes)
        assert isinstance(drafter, ResidentParallel)
        given = state, race, shape, self._nodes, unbranched
        tree, chain = drafter.grow(*given, self._cycle.open_drafter)
        tokens = tree.tokens.clamp(min=0)
        verified = self._cycle.verify(
            state, requests, Drafts(tokens), lambda rows: _placed(rows, tree)
        )
        penalize(verified.logits, tokens, state.penalties, requests)
        depths = tree.depths.flatten()
        chosen = sample_requests(
            verified.logits, argmax(verified.logits), sampling, requests, state.computed + 1, depths
        )
        self._accept(state, requests, verified, tree, chain, chosen, temperatures)

    def _accept(
        self,
        state: ResidentState,
        requests: Tensor,
        verified: Verified,
        tree: Tree,
        chain: Drafts,
        chosen: Tensor,
        temperatures: DraftTemperatures,
    ) -> None:
        path = walk(tree, chosen.view(len(requests), -1), chain.tokens.shape[1])
        starts = state.computed[requests]
        for tensor, slots in self._cycle.target_cache.tensors:
            compact(tensor, slots, requests, starts, state.limits, path.rows)
        self._cycle.learn(
            state, requests, known_alternatives(chain, path), path.chosen, temperatures
        )
        assert verified.features is not None
        features = verified.features.index_select(0, path.reads.flatten())
        settle(state, requests, path.drafts, path.chosen, features)


def _placed(rows: PassRows, tree: Tree) -> PassRows:
    """A pass's rows, by the depths of a tree."""
    positions = (rows.starts[:, None] + tree.depths).flatten()
    return replace(rows, positions=positions, ancestors=tree.ancestors.flatten())

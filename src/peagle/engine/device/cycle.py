"""The cycle on state that stays on the device: what a CUDA graph captures.

Nothing here may depend on a value that only the device knows, so all requests of a batch get the
same number of drafts, and one that wants fewer accepts fewer.
"""

from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from peagle.drafters.proposer import Hidden, Proposer, Texts
from peagle.engine.cycle import Accept, Verified
from peagle.engine.device.models import DeviceModels
from peagle.engine.history import History
from peagle.ops import residual
from peagle.ops.acceptance import Path
from peagle.ops.cached_attention import PassRows
from peagle.ops.cycle_state import CycleState, commit, draft_inputs, verify_inputs
from peagle.ops.draft import Draft, Tree
from peagle.ops.penalties import penalize
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race
from peagle.ops.sampling import Sampling, sample_requests
from peagle.ops.tree import compact, find_unbranched


@dataclass(frozen=True)
class CycleShape:
    """How many rows a cycle has for each of its requests."""

    drafts: int
    """Drafts along a path; 0 where nothing drafts, or while it pauses."""
    pending: int
    """The largest number of rows of a request that the drafter has not seen."""
    nodes: int = 0
    """Drafts where they branch; 0: they are a chain."""


@dataclass(frozen=True)
class DeviceSide:
    """What cycles on the device run on."""

    models: DeviceModels
    proposer: Proposer | None
    history: History | None
    """The texts of a proposer that reads them."""
    accept: Accept
    state: CycleState
    sampling: Sampling


@dataclass(frozen=True)
class DeviceProposerRows:
    """`ProposerRows` of some rows of the request table."""

    models: DeviceModels
    state: CycleState
    requests: Tensor
    """[requests] rows of the state's tables."""
    drafts: int
    pending: int
    nodes: int
    """As in `CycleShape`."""
    race: Race
    history: History | None
    own: bool = False
    """Whether the state is that of these requests alone."""

    @property
    def texts(self) -> Texts:
        """As `ProposerRows`."""
        assert self.history is not None, "a proposer that reads texts says so"
        counts = self.state.computed.index_select(0, self.requests) + 1
        return self.history.of(self.requests, counts)

    @property
    def newest(self) -> Tensor:
        """As `ProposerRows`."""
        return self.state.newest(self.requests)

    def unbranched(self) -> Tensor:
        """As `ProposerRows`."""
        return find_unbranched(self.state, self.requests, self.nodes)

    def run(self, masks: int, first: Tensor | None = None) -> Hidden:
        """As `ProposerRows`."""
        network, models = self.models.network, self.models
        assert network is not None
        given = self.state, self.requests, self.pending, masks
        inputs = draft_inputs(*given, network.norms)
        return network.run(inputs, models.open_network(inputs.rows), first)

    def after(self, tokens: Tensor, features: Tensor) -> "DeviceProposerRows":
        """As `ProposerRows`; the further rows are of a table of their own, a row for each
        request."""
        rows = self if self.own else self._own()
        emitted, features = tokens[:, None], features[:, None]
        computed = rows.state.computed + 1
        state = rows.state._replace(computed=computed, emitted=emitted, features=features)
        return replace(rows, state=state)

    def _own(self) -> "DeviceProposerRows":
        state, requests = self.state, self.requests
        places = torch.arange(len(requests), device=requests.device)
        state = state._replace(
            slots=state.slots.index_select(0, requests),
            limits=state.limits.index_select(0, requests),
            computed=state.computed.index_select(0, requests),
            # the cycle's own state stays as it is: acceptance still reads it
            pending=torch.ones_like(places),
        )
        return replace(self, state=state, requests=places, pending=1, own=True)


class DeviceBatch:
    """`CycleRows` of some rows of the request table."""

    def __init__(self, side: DeviceSide, requests: Tensor, shape: CycleShape) -> None:
        """requests: [requests] table rows."""
        self._side, self._requests, self._shape = side, requests, shape

    def draft(self) -> Draft:
        """Drafts of all requests; those of a cycle without drafts are [requests, 0]."""
        side, requests = self._side, self._requests
        if side.history is not None:
            # what the cycle before has emitted is not in the texts yet
            side.history.follow(side.state, requests)
        if not self._shape.drafts:
            return Draft(requests.new_empty(len(requests), 0))
        assert side.proposer is not None, "whatever has drafts has a proposer"
        race = Race(side.sampling, side.state.computed, requests)
        given = side.models, side.state, requests, *astuple(self._shape), race, side.history
        draft = side.proposer.propose(DeviceProposerRows(*given))
        if draft.source is not None:
            # assigning by an index would wait for the device, here as elsewhere
            side.state.results[:, -1].index_copy_(0, requests, draft.source.used.long())
        return draft

    def verify(self, draft: Draft) -> Verified:
        """What the target makes of a draft."""
        models, state = self._side.models, self._side.state
        target, norm = models.target, models.layers.layers[0].input_norm
        rows, x, normed = verify_inputs(state, self._requests, draft.ids, target.embed.weight, norm)
        if draft.tree is not None:
            rows = _placed(rows, draft.tree)
        first = Normed(normed, None, norm.eps)
        if not target.begins_plainly or target.batch_invariant:
            x = target.scaled(x)
            first = residual.normed(x, norm)  # as a prompt's rows begin
        taps = models.taps(len(x))
        attend, recur = models.open_target(rows), models.recur(rows)
        _, last = models.layers(x, first, attend, taps, recur=recur)
        return Verified(models.logits(last), models.features(taps))

    def accept(self, draft: Draft, verified: Verified) -> Path:
        """Choose a token after each row, which penalizes the logits in place, and follow them."""
        side, requests, logits = self._side, self._requests, verified.logits
        state = side.state
        penalize(logits, draft.ids, state.penalties, requests)
        depths = None if draft.tree is None else draft.tree.depths.flatten()
        # the newest token is at `computed`: the first one that is chosen comes behind it
        firsts = state.computed + 1
        chosen = sample_requests(logits, side.sampling, requests, firsts, depths)
        return side.accept(draft, chosen.view(len(requests), -1), requests)

    def commit(self, draft: Draft, path: Path, verified: Verified) -> None:
        """Make the path the requests' state."""
        side, state, requests = self._side, self._side.state, self._requests
        features = verified.features
        if path.rows is not None and path.reads is not None:
            # before the state moves on: paths count from where the cycle began
            starts = state.computed[requests]
            for tensor, slots in side.models.target_cache.tensors:
                compact(tensor, slots, requests, starts, state.limits, path.rows)
            assert features is not None
            features = features.index_select(0, path.reads.flatten())
        if side.proposer is not None and side.proposer.learns and self._shape.drafts:
            followed = state.ks.index_select(0, requests) > 0
            side.proposer.learn(draft, path, followed)
        commit(state, requests, path, features)
        if (states := side.models.states) is not None:
            states.commit(requests, state.results[:, 0].index_select(0, requests))


def _placed(rows: PassRows, tree: Tree) -> PassRows:
    """The rows of a pass, at the positions that the depths of a tree give them."""
    positions = (rows.starts[:, None] + tree.depths).flatten()
    return replace(rows, positions=positions, ancestors=tree.ancestors.flatten())

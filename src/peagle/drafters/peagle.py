"""P-EAGLE: K tokens from one pass, with K - 1 mask slots after the newest token.

`ParallelDrafter` drafts for requests of any K; `ResidentParallel` does in a captured cycle.
"""

import torch
from torch import Tensor

from peagle.drafters.drafter import DrafterCache, DraftWork, Span
from peagle.drafters.model import DraftModel
from peagle.drafters.resident import CycleShape, OpenPass, ResidentDrafter
from peagle.ops.draft_rows import draft_rows
from peagle.ops.drafts import Drafts
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race
from peagle.ops.resident import ResidentState, draft_inputs
from peagle.ops.tree import Tree


class ParallelDrafter:
    """Runs known rows and mask slots together; mask slots never stay in the kept cache.

    A mask slot's keys are written to positions that the next pass overwrites with real rows before
    anything reads them.
    """

    def __init__(self, model: DraftModel) -> None:
        assert model.config.mask_token_id is not None, "a P-EAGLE drafter has a mask token"
        self.model = model
        device = model.mask_hidden.device
        self._mask_token = torch.tensor([model.config.mask_token_id], device=device)
        self._mask_feature = model.mask_feature()

    def propose(self, work: DraftWork, cache: DrafterCache) -> Drafts:
        """One forward over every request's known rows and mask slots; K tokens for each."""
        hidden, reads = self._forward(work, cache)
        return self._read(hidden, reads, work) if work.active else Drafts(work.tokens[:0])

    def grow(self, work: DraftWork, cache: DrafterCache, nodes: int) -> tuple[Tree, Drafts | None]:
        """A tree of one request's drafts, and those that `propose` makes if they are drawn."""
        hidden, reads = self._forward(work, cache)
        [k] = work.ks
        unbranched = torch.zeros(1, dtype=torch.int64, device=reads.device)
        return self.model.readout.grow(
            hidden.index_select(0, reads), k, work.race, nodes, unbranched
        )

    def _forward(self, work: DraftWork, cache: DrafterCache) -> tuple[Tensor, Tensor]:
        """The hidden states of all rows, and which of them drafts are read from."""
        counts = [span.count for span in work.spans]
        sources, reads = draft_rows(counts, work.ks, work.tokens.device)
        tokens = torch.cat((work.tokens, self._mask_token)).index_select(0, sources)
        features = torch.cat((self.model.project(work.features), self._mask_feature))
        positions, attend = cache.open(
            [
                Span(s.row, s.start, s.count + max(k - 1, 0))
                for s, k in zip(work.spans, work.ks, strict=True)
            ]
        )
        hidden = self.model(tokens, features.index_select(0, sources), positions, attend)
        return hidden, reads

    def resident(self) -> "ResidentParallel":
        """The same for a captured cycle."""
        return ResidentParallel(self.model)

    def _read(self, hidden: Tensor, reads: Tensor, work: DraftWork) -> Drafts:
        """Drafts of all slots; a request with a smaller K has its last slot read again."""
        ks = torch.tensor([k for k in work.ks if k > 0], device=reads.device)
        most = max(work.ks)
        slots = torch.arange(most, device=reads.device)
        places = (ks.cumsum(0) - ks)[:, None] + slots.minimum(ks[:, None] - 1)
        rows = hidden.index_select(0, reads[places].flatten())
        drafts = self.model.readout.draft(rows, most, work.race_of(work.active))
        return drafts.kept(slots < ks[:, None])


class ResidentParallel(ResidentDrafter):
    """Pending rows and mask slots in one pass."""

    def propose(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Drafts:
        hidden = self._slots(state, race, shape, open_pass)
        return self.model.readout.draft_normed(hidden, shape.drafts, race)

    def grow(
        self,
        state: ResidentState,
        race: Race,
        shape: CycleShape,
        nodes: int,
        unbranched: Tensor,
        open_pass: OpenPass,
    ) -> tuple[Tree, Drafts]:
        """A tree of drafts, and those that `propose` makes. nodes, unbranched: as of `grow`."""
        hidden = self._slots(state, race, shape, open_pass)
        return self.model.readout.grow_normed(hidden, shape.drafts, race, nodes, unbranched)

    def _slots(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Normed:
        """What drafts are read from: [requests * drafts, hidden_size]."""
        inputs = draft_inputs(state, race.requests, shape.pending, shape.drafts - 1, self.norms)
        _, hidden = self.run(inputs, open_pass)
        return hidden

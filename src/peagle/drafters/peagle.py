"""P-EAGLE: K tokens from one pass, with K - 1 mask slots after the newest token."""

import torch
from torch import Tensor

from peagle.drafters.drafter import DraftWork, Memory, Span
from peagle.drafters.model import DraftModel
from peagle.ops.draft_rows import draft_rows


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

    def propose(self, work: DraftWork, memory: Memory) -> Tensor:
        """One forward over every request's known rows and mask slots; K tokens for each."""
        counts = [span.count for span in work.spans]
        sources, reads = draft_rows(counts, work.ks, work.tokens.device)
        tokens = torch.cat((work.tokens, self._mask_token)).index_select(0, sources)
        features = torch.cat((self.model.project(work.features), self._mask_feature))
        positions, attend = memory.open(
            [
                Span(s.row, s.start, s.count + max(k - 1, 0))
                for s, k in zip(work.spans, work.ks, strict=True)
            ]
        )
        hidden = self.model(tokens, features.index_select(0, sources), positions, attend)
        return self.model.most_likely(hidden.index_select(0, reads))

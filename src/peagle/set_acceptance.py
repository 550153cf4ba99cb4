"""Acceptance that is set: for measuring time, whatever the target says. The text means nothing."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.ops.acceptance import Path
from peagle.ops.draft import NO_DRAFT, Draft

STRIDE, OFFSET = -1640531527, 1640531527
"""What a draw moves by from cycle to cycle, modulo 2**32 the golden section of it, so that the
first n draws are spread evenly for every n; and from table row to table row."""


class SetAcceptance:
    """Accepts draft 1, 2, ... K in given shares of all cycles."""

    def __init__(self, rates: Sequence[float]) -> None:
        """rates: the share of cycles in which each draft is accepted, none above the one before."""
        self._below = [min(round(rate * 2**32) - 2**31, 2**31 - 1) for rate in rates]
        """Draws below which each draft is accepted; draws are all int32."""

    def open(self, rows: int, device: torch.device) -> Callable[[Draft, Tensor, Tensor], Path]:
        """For requests in so many table rows."""
        below = torch.tensor(self._below, dtype=torch.int32, device=device)
        draws = (torch.arange(rows, device=device) * OFFSET).to(torch.int32)

        def accept(draft: Draft, chosen: Tensor, requests: Tensor) -> Path:
            count = draft.tokens.shape[1]
            if not count:
                return Path(draft.tokens, chosen)
            drawn = draws.index_select(0, requests)
            draws.index_copy_(0, requests, drawn + STRIDE)
            accepted = (drawn[:, None] < below[:count]) & (draft.tokens != NO_DRAFT)
            taken = torch.where(accepted, draft.ids, chosen[:, :-1])
            drafts = torch.where(accepted, draft.ids, NO_DRAFT)
            return Path(drafts, torch.cat((taken, chosen[:, -1:]), dim=1))

        return accept

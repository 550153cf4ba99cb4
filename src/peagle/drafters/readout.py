"""From draft layers' output to drafts: final norm, head, draft vocabulary, correction, choice.

The model, the loss and both of the engine's drafters read a drafter's output through this object.
"""

import torch
from torch import Tensor, nn

from peagle.drafters.selector import Selector
from peagle.models.spec import DecoderSpec
from peagle.ops import residual
from peagle.ops.argmax import argmax
from peagle.ops.candidates import Candidates, Pairs, earliest, likeliest
from peagle.ops.draft import draw
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race
from peagle.ops.softcap import softcap

CANDIDATES = 16
"""Drafts of each slot that take part in a draw or may be nodes, where there is no selector."""


class Readout(nn.Module):
    """What turns a drafter's residual stream into drafts."""

    def __init__(
        self, shape: DecoderSpec, draft_vocab_size: int, selector: Selector | None = None
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.norm.eps)
        self.head = Linear(shape.hidden_size, draft_vocab_size)
        self.selector = selector
        self.logit_scale, self.softcap = 1.0, None
        offsets = torch.zeros(draft_vocab_size, dtype=torch.int64, device="cpu")
        self.register_buffer("d2t", offsets, persistent=False)

    logit_scale: float
    softcap: float | None
    """What logits are multiplied by, and then capped at, before they are compared with others."""
    d2t: Tensor
    """[draft_vocab_size] target id = draft id + d2t[draft id]; zeros for the whole vocabulary."""

    @property
    def vocabulary(self) -> Tensor:
        """[draft_vocab_size] the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Residual stream [rows, hidden_size] -> logits [rows, draft_vocab_size]."""
        return self._scaled(self.head(self.norm(hidden)))

    def _scaled(self, logits: Tensor) -> Tensor:
        return softcap(logits if self.logit_scale == 1 else logits * self.logit_scale, self.softcap)

    def candidates(
        self, logits: Tensor, race: Race | None = None, depth: int = 0, whole: bool = True
    ) -> Candidates:
        """The likeliest drafts, or the earliest of a race. logits: [rows, draft_vocab_size]; depth,
        whole: as in `earliest`."""
        count = CANDIDATES if self.selector is None else self.selector.config.candidates
        if race is None:
            return likeliest(logits, self.d2t, count)
        return earliest(logits, self.d2t, count, race, depth, whole)

    def forward(self, hidden: Tensor, previous: Tensor) -> tuple[Candidates, Tensor]:
        """The likeliest drafts after known tokens, and their corrected scores.

        hidden: [rows, hidden_size]; previous: [rows] the token before each row's draft, -1 where
        the row has read it; scores: [rows, candidates] in float32. Without a selector they are
        those of the head. Gradients reach the selector and, through its gates, `hidden`.
        """
        with torch.no_grad():
            found = self.candidates(self.logits(hidden))
        if self.selector is None:
            return found, found.scores
        gates = self.selector.projection(self.norm(hidden))
        added = self.selector(gates, previous.clamp(min=0)[:, None], found.ids)[:, 0]
        return found, found.scores + added.float() * (previous >= 0)[:, None]

    def draft(
        self,
        hidden: Normed,
        slots: int,
        race: Race | None = None,
        depth: int = 0,
        before: Tensor | None = None,
    ) -> Tensor:
        """Drafts of consecutive slots, one behind another: [requests, slots] target ids.

        hidden: [requests * slots, hidden_size] under the final norm; race: the draws that they are
        for, None for the most likely drafts; depth: that of the first slot; before: [requests] the
        token before the first slot; None: the slot has read it, so that its draft is not corrected.
        """
        if self.selector is None and race is None:
            return argmax(residual.linear(hidden, self.head), self.d2t).view(-1, slots)
        whole = self.selector is not None
        found, pairs = self.slots(hidden, slots, race, depth, whole, before)
        return draw(found, pairs, race, depth)

    def slots(
        self,
        hidden: Normed,
        slots: int,
        race: Race | None = None,
        depth: int = 0,
        whole: bool = True,
        before: Tensor | None = None,
    ) -> tuple[Candidates, Pairs | None]:
        """Drafts that may be chosen in consecutive slots [requests, slots, candidates], and how
        those of neighbouring slots go together; None without a selector.

        whole: as in `earliest`; the other arguments as of `draft`.
        """
        logits = self._scaled(residual.linear(hidden, self.head))
        found = self.candidates(logits, race, depth, whole).by_request(slots)
        if self.selector is None or (slots == 1 and before is None):
            return found, None
        gates = residual.linear(hidden, self.selector.projection)
        pairs = self.selector.pairs(gates.view(-1, slots, gates.shape[-1]))
        if before is not None:
            first = self.selector.pairs(pairs.gates[:, 0])
            found.scores[:, 0] += first.scores(before[:, None], found.ids[:, 0])[:, 0]
        return found, pairs

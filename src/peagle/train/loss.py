"""Loss and accuracy of the charged elements; logits exist for one chunk at a time only."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from peagle.drafters.model import DraftModel
from peagle.models.decoder import Decoder

CHUNK = 32768
"""Elements whose logits are in memory at once."""
LossRule = Callable[[Tensor, Tensor], Tensor]


def kl(draft: Tensor, target: Tensor) -> Tensor:
    """KL(target || draft) of each row; logits [rows, draft_vocab] -> [rows]."""
    wanted = target.log_softmax(dim=-1)
    return F.kl_div(draft.log_softmax(dim=-1), wanted, log_target=True, reduction="none").sum(-1)


def cross_entropy(draft: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each row against the target's most likely token."""
    return F.cross_entropy(draft, target.argmax(dim=-1), reduction="none")


LOSSES: dict[str, LossRule] = {"kl": kl, "cross_entropy": cross_entropy}


@dataclass(frozen=True)
class Charged:
    """The loss of a pass and, of each charged element, whether the drafter agrees."""

    total: Tensor
    """Weighted sum of the elements' losses."""
    agrees: Tensor
    """[elements] bool: the drafter's most likely token is the target's."""


class Comparison:
    """Compares a drafter's hidden states with the target's, chunk by chunk."""

    def __init__(self, model: DraftModel, target: Decoder, rule: LossRule) -> None:
        self._model, self._target, self._rule = model, target, rule
        reduced = model.config.reduced_vocabulary
        ids = torch.arange(model.config.draft_vocab_size, device=model.d2t.device) + model.d2t
        self._kept = ids if reduced else None

    def __call__(self, hidden: Tensor, final: Tensor, weights: Tensor) -> Charged:
        """hidden, final: [elements, hidden_size] of drafter and target; weights: [elements]."""
        totals, agreements = [], []
        for part in zip(hidden.split(CHUNK), final.split(CHUNK), weights.split(CHUNK), strict=True):
            total, agrees = checkpoint(self._chunk, *part, use_reentrant=False)
            totals.append(total)
            agreements.append(agrees)
        if not totals:
            return Charged(hidden.sum() * 0.0, weights > 0)
        return Charged(torch.stack(totals).sum(), torch.cat(agreements))

    def _chunk(self, hidden: Tensor, final: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        draft = self._model.logits(hidden).float()
        with torch.no_grad():
            target = self._target.head(final.to(self._target.embed.weight.dtype)).float()
            best = target.argmax(dim=-1)
            agrees = self._model.target_ids(draft.argmax(dim=-1)) == best
            if self._kept is not None:
                target = target[:, self._kept]
        return (self._rule(draft, target) * weights).sum(), agrees

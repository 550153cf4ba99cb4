"""Loss of charged elements: the vocabulary is projected chunk by chunk, and for them alone."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafters.model import DraftModel
from peagle.models.decoder import Decoder
from peagle.train.transfer import to_device

CHUNK = 4096
"""Elements whose logits are in memory at once."""
LossRule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits of drafter and target [rows, draft_vocab] -> losses [rows] in float32, and the gradient of
their sum with respect to the drafter's logits."""


def kl(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """KL(target || draft) of each row."""
    ours, wanted = draft.float().log_softmax(dim=-1), target.float().log_softmax(dim=-1)
    shares = wanted.exp()
    return (shares * (wanted - ours)).sum(dim=-1), ours.exp() - shares


def cross_entropy(draft: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each row against the target's most likely token."""
    ours, best = draft.float().log_softmax(dim=-1), target.argmax(dim=-1, keepdim=True)
    gradient = ours.exp().scatter_add(-1, best, torch.full_like(best, -1, dtype=ours.dtype))
    return -ours.gather(-1, best)[:, 0], gradient


LOSSES: dict[str, LossRule] = {"kl": kl, "cross_entropy": cross_entropy}


class Comparison:
    """Compares a drafter's hidden states with the target's."""

    def __init__(self, model: DraftModel, target: Decoder, rule: LossRule) -> None:
        self._model, self._target, self._rule = model, target, rule
        self._wanted = target.head.weight.detach()
        if model.config.reduced_vocabulary:
            ids = torch.arange(model.config.draft_vocab_size, device=model.d2t.device) + model.d2t
            self._wanted = self._wanted[ids]

    def loss(self, hidden: Tensor, final: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Sum of the weighted losses of some elements.

        hidden: [elements, hidden_size] the drafter's residual stream; final: [length, hidden_size]
        the target's; places: [elements], on the CPU, where in `final` each element's target is;
        weights: [elements].
        """
        normed = self._model.norm(hidden)
        total: Tensor = _HeadLoss.apply(
            normed, self._model.head.weight, final, self._wanted, places, weights, self._rule
        )
        return total

    @torch.no_grad()
    def agrees(self, hidden: Tensor, final: Tensor, places: Tensor) -> Tensor:
        """[elements] bool: whether the drafter's most likely token is the target's, of all."""
        found = []
        (places,) = to_device(hidden.device, places)
        for part, place in zip(hidden.split(CHUNK), places.split(CHUNK), strict=True):
            draft = self._model.target_ids(self._model.logits(part).argmax(dim=-1))
            found.append(draft == self._target.head(final[place]).argmax(dim=-1))
        return torch.cat(found)


class _HeadLoss(torch.autograd.Function):
    """Head and loss in one: a chunk's gradient is taken while its logits are there.

    Chunks are of neighbouring places, so that the target's logits are computed about once a place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        final: Tensor,
        wanted: Tensor,
        places: Tensor,
        weights: Tensor,
        rule: LossRule,
    ) -> Tensor:
        weigh = _compiled() if hidden.is_cuda else _weigh
        total = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        for chunk in places.argsort().split(CHUNK):
            asked = places[chunk].unique(return_inverse=True)
            rows, unique, which = to_device(hidden.device, chunk, *asked)
            x = hidden[rows]
            draft, target = F.linear(x, head), F.linear(final[unique], wanted)
            part, gradient = weigh(rule, draft, target, which, weights[rows])
            total += part
            of_hidden[rows] = gradient @ head
            if of_head is not None:
                of_head += gradient.mT @ x
        ctx.save_for_backward(of_hidden, of_head)
        ctx.dtype = head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        of_head = None if of_head is None else (of_head * gradient).to(ctx.dtype)
        return of_hidden * gradient.to(of_hidden.dtype), of_head, None, None, None, None, None


def _weigh(
    rule: LossRule, draft: Tensor, target: Tensor, which: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted sum of a rule's losses, and its gradient in the logits' dtype.

    target: [places, draft_vocab], of which `which` [elements] tells each element's: elements of
    several chains are asked for the same token.
    """
    losses, gradient = rule(draft, target[which])
    return losses @ weights, (gradient * weights[:, None]).to(draft.dtype)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_weigh, dynamic=True)

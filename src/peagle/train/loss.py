"""The loss: logits are computed chunk by chunk, and only for the elements in it."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafters.model import DraftModel
from peagle.models.decoder import Decoder
from peagle.ops.divergence import weigh
from peagle.ops.softcap import softcap
from peagle.ops.weight import dense
from peagle.transfer import to_device

CHUNK = 4096
"""Number of elements whose logits are in memory at once."""


class Comparison:
    """Compares a drafter's hidden states with the target's."""

    def __init__(self, model: DraftModel, target: Decoder, loss: str) -> None:
        """loss: a name in `divergence.LOSSES`."""
        self._model, self._target, self._loss = model, target, loss
        self._wanted = dense(target.head.weight).detach()
        if model.config.reduced_vocabulary:
            ids = torch.arange(model.config.draft_vocab_size, device=model.d2t.device) + model.d2t
            self._wanted = self._wanted[ids]

    def loss(self, hidden: Tensor, final: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Sum of the weighted losses of some elements.

        hidden: [elements, hidden_size] the drafter's residual stream; final: [length, hidden_size]
        the target's; places: [elements], on the CPU, the row of `final` for each element; weights:
        [elements].
        """
        normed = self._model.norm(hidden)
        total: Tensor = _HeadLoss.apply(
            normed,
            self._model.head.weight,
            final,
            self._wanted,
            self._target.spec.logit_softcap,
            places,
            weights,
            self._loss,
        )
        return total

    @torch.no_grad()
    def agrees(self, hidden: Tensor, final: Tensor, places: Tensor) -> Tensor:
        """[elements] bool: whether the drafter's most likely token is the target's, out of all."""
        found = []
        (places,) = to_device(hidden.device, places)
        for part, place in zip(hidden.split(CHUNK), places.split(CHUNK), strict=True):
            draft = self._model.most_likely(part)
            found.append(draft == self._target.logits(final[place]).argmax(dim=-1))
        return torch.cat(found)


class _HeadLoss(torch.autograd.Function):
    """Head and loss in one: a chunk's gradient is taken while its logits are in memory.

    Chunks have neighbouring places, so the target's logits are computed about once per place.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        final: Tensor,
        wanted: Tensor,
        cap: float | None,
        places: Tensor,
        weights: Tensor,
        loss: str,
    ) -> Tensor:
        total = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head, dtype=torch.float32) if head.requires_grad else None
        for chunk in places.argsort().split(CHUNK):
            asked = places[chunk].unique(return_inverse=True)
            rows, unique, which = to_device(hidden.device, chunk, *asked)
            x = hidden[rows]
            draft, target = F.linear(x, head), softcap(F.linear(final[unique], wanted), cap)
            part, gradient = weigh(loss, draft, target, which, weights[rows])
            total += part
            of_hidden[rows] = gradient @ head
            if of_head is not None:
                of_head += gradient.mT @ x
            del draft, target, gradient  # before the next chunk's are allocated
        ctx.save_for_backward(of_hidden, of_head)
        ctx.dtype = head.dtype
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        of_head = None if of_head is None else (of_head * gradient).to(ctx.dtype)
        return of_hidden * gradient.to(of_hidden.dtype), of_head, None, None, None, None, None, None

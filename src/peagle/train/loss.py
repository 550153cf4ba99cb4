"""The loss: logits are computed chunk by chunk, and only for the elements in it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.drafters.network import Network
from peagle.models.ends import Ends
from peagle.ops.acceptance import shared_draw
from peagle.ops.divergence import weigh
from peagle.ops.softcap import softcap
from peagle.ops.weight import dense
from peagle.train.cod import Elements
from peagle.transfer import to_device

CHUNK, CHUNK_LOGITS = 4096, 2**26
"""The least number of elements whose logits are in memory at once, and of such logits."""


def chunk_rows(vocabulary: int) -> int:
    """Number of elements whose logits are in memory at once: with few tokens, a chunk of few
    elements costs the host more than the device."""
    return max(CHUNK, CHUNK_LOGITS // vocabulary)


class Comparison:
    """Compares a drafter's hidden states with the target's."""

    def __init__(self, model: Network, target: Ends, loss: str) -> None:
        """loss: a name in `divergence.LOSSES`."""
        self._readout, self._target, self._loss = model.readout, target, loss
        self._wanted = dense(target.head.weight).detach()
        if model.config.reduced_vocabulary:
            self._wanted = self._wanted[model.readout.vocabulary]

    def loss(self, hidden: Tensor, final: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        """Sum of the weighted losses of some elements.

        hidden: [elements, hidden_size] the drafter's residual stream; final: [length, hidden_size]
        the target's; places: [elements], on the CPU, the row of `final` for each element; weights:
        [elements].
        """
        ours = self._readout.norm(hidden), dense(self._readout.head.weight)
        theirs = final, self._wanted, self._target.spec.logit_softcap
        return _HeadLoss.apply(*ours, *theirs, places, weights, self._loss)

    def selector_loss(
        self, hidden: Tensor, final: Tensor, places: Tensor, weights: Tensor, previous: Tensor
    ) -> Tensor:
        """Sum of the weighted cross-entropies of the selector's scores to the target's shares of
        the same candidates. Arguments as in `loss`, and those of `Readout`."""
        total = torch.zeros((), device=hidden.device)
        for part, place, weight, before in self._chunks(hidden, places, weights, previous):
            found, scores = self._readout(part, before)
            with torch.no_grad():
                wanted = self._target.logits(final[place]).gather(-1, found.tokens).float()
            losses = F.cross_entropy(scores, wanted.softmax(dim=-1), reduction="none")
            total = total + losses @ (weight * (before >= 0))
        return total

    @torch.no_grad()
    def confidence(self, hidden: Tensor, final: Tensor, places: Tensor) -> Tensor:
        """[elements] the drafter's probability of the target's most likely token."""
        found = []
        for part, place in self._chunks(hidden, places):
            best = F.linear(final[place], self._wanted).argmax(dim=-1, keepdim=True)
            ours = self._readout.logits(part).float().log_softmax(dim=-1)
            found.append(ours.gather(-1, best)[:, 0].exp())
        return torch.cat(found)

    @torch.no_grad()
    def judge(
        self, hidden: Tensor, final: Tensor, places: Tensor, previous: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How often drafts are accepted after accepted ones: [elements] each.

        bool: whether the drafter's choice at temperature 0 is the target's, out of all tokens; the
        probability that at temperature 1 both draw the same. Arguments as in `selector_loss`.
        """
        agree, drawn = [hidden.new_zeros(0, dtype=torch.bool)], [hidden.new_zeros(0)]
        for part, place, before in self._chunks(hidden, places, previous):
            found, scores = self._readout(part, before)
            target = self._target.logits(final[place]).float()
            best = scores.argmax(dim=-1, keepdim=True)
            agree.append(found.tokens.gather(-1, best)[:, 0] == target.argmax(dim=-1))
            shares = target.softmax(dim=-1).gather(-1, found.tokens)
            drawn.append(shared_draw(shares, scores.softmax(dim=-1)).to(hidden.dtype))
        return torch.cat(agree), torch.cat(drawn)

    def _chunks(self, hidden: Tensor, places: Tensor, *more: Tensor) -> Iterator[Sequence[Tensor]]:
        """Rows of some tensors, as many as have their logits in memory at once; places: on the
        CPU."""
        (there,) = to_device(hidden.device, places)
        rows = chunk_rows(len(self._wanted))
        yield from zip(*(part.split(rows) for part in (hidden, there, *more)), strict=True)


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
        for chunk in places.argsort().split(chunk_rows(len(head))):
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


def pace(confidence: Tensor, elements: Elements, smoothing: float) -> Tensor:
    """D-PACE's weights [elements], with a mean of 1: an element weighs as much as acceptance length
    depends on it.

    With q_i the confidence at depth i of a chain and a the smoothing, depth j weighs the sum over
    k >= j of the products of (1 - a) q_i + a for i <= k: how many tokens are expected to be
    accepted through j. confidence: [elements] the drafter's probability of the token that the
    target takes; whole chains, from depth 0 on.
    """
    if not len(elements.depths):
        return confidence
    anchors, which = elements.anchors.unique(return_inverse=True)
    which, depths = (part.to(confidence.device) for part in (which, elements.depths))
    table = confidence.new_zeros(len(anchors), int(elements.depths.max()) + 1)
    table[which, depths] = (1 - smoothing) * confidence + smoothing
    reached = table.cumprod(dim=1).flip(1).cumsum(dim=1).flip(1)
    weights = reached[which, depths]
    return weights / weights.mean()

"""How far a drafter's distribution is from the target's, and which way to go, from their logits."""

from collections.abc import Callable

import torch
from torch import Tensor

from peagle.ops.triton import in_kernels

LossRule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits of drafter and target [rows, vocab] -> losses [rows] in float32, and the gradient of their
sum with respect to the drafter's logits."""


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


@in_kernels("divergence")
def weigh(
    loss: str, draft: Tensor, target: Tensor, which: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted losses' sum, and its gradient in the logits' dtype, perhaps in `draft`'s place.

    loss: a name in `LOSSES`; draft: [rows, vocab]; target: [places, vocab], of which `which` [rows]
    tells each row's: several rows may ask for the same; weights: [rows] in float32.
    """
    losses, gradient = LOSSES[loss](draft, target[which])
    return losses @ weights, (gradient * weights[:, None]).to(draft.dtype)

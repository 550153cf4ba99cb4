"""D-PACE: elements weigh as much in the loss as acceptance length depends on them."""

from torch import Tensor

from peagle.train.cod import Elements


def pace(confidence: Tensor, elements: Elements, smoothing: float) -> Tensor:
    """Weights [elements] with a mean of 1.

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

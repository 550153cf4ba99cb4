"""A reduced draft vocabulary: the target's most frequent tokens, and the map between the two."""

import torch
from torch import Tensor


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Target ids of the `size` most frequent tokens, ascending. counts: [vocab_size]."""
    order = torch.argsort(counts, descending=True, stable=True)
    return order[:size].sort().values


def offsets(kept: Tensor) -> Tensor:
    """`d2t` of the checkpoint: target id = draft id + d2t[draft id]. kept: ascending target ids."""
    return kept - torch.arange(len(kept))


def membership(kept: Tensor, vocab_size: int) -> Tensor:
    """`t2d` of the checkpoint: whether each target id is in the draft vocabulary, bool."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[kept] = True
    return mask

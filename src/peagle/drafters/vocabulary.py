"""A reduced draft vocabulary: the target's most frequent tokens, and the map between the two."""

import torch
from torch import Tensor


def most_frequent(counts: Tensor, size: int) -> Tensor:
    """Target ids of the `size` most frequent tokens, ascending. counts: [vocab_size]."""
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def offsets(kept: Tensor) -> Tensor:
    """`d2t` of the checkpoint: target id = draft id + d2t[draft id]. kept: ascending target ids."""
    return kept - torch.arange(len(kept))


def membership(kept: Tensor, vocab_size: int) -> Tensor:
    """`t2d` of the checkpoint: whether each target id is in the draft vocabulary, bool."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[kept] = True
    return mask


def doubts(d2t: Tensor, t2d: Tensor | None, vocab_size: int) -> list[str]:
    """What is wrong with a map whose ids are all within the target's vocabulary, each with a fix.

    A drafter runs with such a map, but its drafts are other tokens than it means, and are refused.
    """
    again = "export the drafter again"
    if d2t.is_floating_point():
        return [f"d2t is {d2t.dtype}, which rounds large offsets; {again} with d2t as int64"]
    kept = d2t.to(torch.int64) + torch.arange(len(d2t))
    repeats = len(kept) - len(kept.unique())
    if repeats:
        return [f"d2t maps {repeats} draft ids to tokens that others have already; {again}"]
    if t2d is not None:
        if tuple(t2d.shape) != (vocab_size,):
            return [f"t2d has shape {list(t2d.shape)}, expected [{vocab_size}]; {again}"]
        differ = int((membership(kept, vocab_size) != t2d.bool()).sum())
        return [f"d2t and t2d disagree about {differ} tokens; {again}"] if differ else []
    if not bool(d2t.any()):
        return [f"d2t is all zeros, so the draft ids would be the target's first tokens; {again}"]
    return []

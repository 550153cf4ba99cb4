"""The most likely token of each row."""

import torch
from torch import Tensor

from peagle.ops.triton import in_kernels


@in_kernels("argmax")
def argmax(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Index of each row's largest number, the first of equals; -1 for a row with NaN.

    logits: [rows, vocab]; result: [rows] int64. A draft vocabulary's offsets [vocab] are added to
    the index; a row with NaN is then the vocabulary's first token.
    """
    best = logits.argmax(dim=-1)  # a NaN counts as the largest
    best = torch.where(logits.gather(-1, best[:, None])[:, 0].isnan(), -1, best)
    if offsets is None:
        return best
    best = best.clamp(min=0)
    return best + offsets[best]

"""The soft cap of logits, which bounds them without changing their order."""

import torch
from torch import Tensor


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """`cap * tanh(logits / cap)`; None: the logits as they are."""
    return logits if cap is None else torch.tanh(logits / cap) * cap

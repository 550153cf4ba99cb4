"""The soft cap of logits, which bounds them without changing their order."""

from torch import Tensor


def softcap(logits: Tensor, cap: float | None) -> Tensor:
    """`cap * tanh(logits / cap)`, without a gradient; None: the logits as they are."""
    return logits if cap is None else (logits / cap).tanh_().mul_(cap)

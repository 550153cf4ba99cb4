"""Root-mean-square normalisation."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.ops.packing import Packable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the mean taken in float32.

    x: [..., width]; weight: [width], or broadcastable to x (one weight vector per head). A weight
    of more bits than x is multiplied before anything is rounded.
    """
    if weight.dtype != x.dtype:
        return (normalized(x.to(weight.dtype), eps) * weight).to(x.dtype)
    return normalized(x, eps) * weight


def normalized(x: Tensor, eps: float) -> Tensor:
    """`x / rms(x)` over the last dimension, the mean taken in float32."""
    return F.rms_norm(x, x.shape[-1:], None, eps)


@dataclass(frozen=True)
class FoldedNorm:
    """A norm's constants, arranged so that applying it takes few calls.

    With n the width, rms(x) = hypot(|x|, sqrt(n * eps)) / sqrt(n). A row of a small model costs
    less than the calls around it.
    """

    weight: Tensor
    """weight * sqrt(n)"""
    floor: Tensor
    """sqrt(n * eps), a scalar"""

    def __call__(self, x: Tensor) -> Tensor:
        """The same as `rms_norm` for float32 x."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).hypot_(self.floor)
        return torch.div(self.weight, length).mul_(x)


def fold(weight: Tensor, eps: float) -> FoldedNorm | None:
    """The folded form of a weight [..., width] where it is quicker: on a CPU, in float32."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    width = weight.shape[-1]
    return FoldedNorm(weight.detach() * width**0.5, weight.new_tensor((width * eps) ** 0.5))


class RMSNorm(Packable):
    """`rms_norm` with its learned weight [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps
        self.folded: FoldedNorm | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.folded is not None and x.dtype == torch.float32:
            return self.folded(x)
        return rms_norm(x, self._weights(), self.eps)

    def pack(self) -> None:
        """Fold the weight where that is quicker."""
        self.folded = fold(self._weights(), self.eps)

    def _weights(self) -> Tensor:
        """The weight, broadcastable to x."""
        return self.weight


class HeadNorm(RMSNorm):
    """QK norm: one weight for all queries and one for all keys; x is [rows, heads, head_dim]."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__(2 * head_dim, eps)
        which = torch.tensor([0] * heads + [1] * kv_heads, device="cpu")
        self.register_buffer("weight_of_head", which, persistent=False)

    weight_of_head: Tensor

    def _weights(self) -> Tensor:
        """[heads + kv_heads, head_dim]"""
        return self.weight.view(2, -1).index_select(0, self.weight_of_head)

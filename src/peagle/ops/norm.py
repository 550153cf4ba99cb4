"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / rms(x) * weight` over the last dimension, the mean taken in float32.

    x: [..., width]; weight: [width], or broadcastable to x (one weight vector per head).
    """
    if x.device.type == "cpu" and x.dtype == torch.float32 and not torch.is_grad_enabled():
        return _rms_norm_few_launches(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def _rms_norm_few_launches(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    # A row of a small model costs less than the calls around it: few calls, in place.
    scale = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scale.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).mul_(weight)


class RMSNorm(nn.Module):
    """`rms_norm` with its learned weight [width]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

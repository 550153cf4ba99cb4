"""The input of a product: a stream under its norm, divided by its root mean square or not yet."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Normed:
    """The input of a product: a stream times its norm's weight."""

    x: Tensor
    """[rows, width]"""
    squares: Tensor | None
    """[parts, rows] sums of squares of the stream; None where x is divided by its rms already."""
    eps: float

    def scale(self) -> Tensor:
        """What x still has to be multiplied by: [rows, 1] in float32."""
        if self.squares is None:
            return torch.ones(len(self.x), 1, device=self.x.device)
        mean = self.squares.sum(dim=0)[: len(self.x), None] / self.x.shape[1]
        return torch.rsqrt(mean + self.eps)

"""AdamW that reads and writes its state once to clip, update and copy the weights."""

from collections.abc import Callable, Iterable
from functools import cache
from math import gcd, sqrt

import torch
from torch import Tensor, nn

BETAS = 0.9, 0.95
EPSILON = 1e-8
LINE = 128
"""Length of the rows that parameters are viewed as, so the compiler can use wide loads."""


class AdamW(torch.optim.Optimizer):
    """Torch's AdamW, with the same state; on a GPU one kernel per parameter tensor.

    Clipping, torch's own update and the copy in sequence move 42 bytes per parameter; this moves
    30, and nothing else bounds an optimizer's step.
    """

    def __init__(
        self, masters: Iterable[nn.Parameter], copies: dict[nn.Parameter, Tensor], decay: float
    ) -> None:
        """copies: the tensors that compute in place of their masters, where those differ."""
        super().__init__(masters, {"lr": 0.0, "weight_decay": decay})
        self._copies = copies

    @torch.no_grad()
    def step(self, scale: Tensor) -> None:  # type: ignore[override]
        """Update the masters, all of which have a gradient. scale: [], multiplies the gradients."""
        update = _compiled() if scale.is_cuda else _update
        for group in self.param_groups:
            states = [self._kept(master) for master in group["params"]]
            factors = _factors(float(states[0]["step"]), group["lr"], group["weight_decay"])
            factors_there = [torch.full_like(scale, factor) for factor in factors]
            for master, kept in zip(group["params"], states, strict=True):
                tensors = [master, master.grad, kept["exp_avg"], kept["exp_avg_sq"]]
                if master in self._copies:
                    tensors.append(self._copies[master])
                update(scale, *factors_there, *map(_lines, tensors))

    def _kept(self, master: nn.Parameter) -> dict[str, Tensor]:
        """A master's state, with its step count advanced."""
        kept: dict[str, Tensor] = self.state[master]
        if not kept:
            kept["step"] = torch.zeros((), device="cpu")
            kept["exp_avg"], kept["exp_avg_sq"] = (torch.zeros_like(master) for _ in range(2))
        kept["step"] += 1
        return kept


def _factors(step: float, rate: float, decay: float) -> tuple[float, float, float]:
    """Factors of the weights, of the mean, and of the root of the mean of squares."""
    return 1 - rate * decay, rate / (1 - BETAS[0] ** step), 1 / sqrt(1 - BETAS[1] ** step)


def _update(
    scale: Tensor,
    shrink: Tensor,
    rate: Tensor,
    spread: Tensor,
    master: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    copy: Tensor | None = None,
) -> None:
    """One step of one parameter, in place. The factors are one-element tensors, since a number
    would make the compiler compile again for each new value."""
    gradient = gradient * scale
    mean.mul_(BETAS[0]).add_(gradient, alpha=1 - BETAS[0])
    square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    master.mul_(shrink).sub_(rate * mean / (square.sqrt() * spread + EPSILON))
    if copy is not None:
        copy.copy_(master)


def _lines(tensor: Tensor) -> Tensor:
    """[...] -> [elements / LINE, LINE] if LINE divides them; the same memory."""
    return tensor.detach().view(-1, gcd(tensor.numel(), LINE))


@cache
def _compiled() -> Callable[..., None]:
    return torch.compile(_update)

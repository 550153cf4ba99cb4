"""A product that adds its weight's gradient to a float32 sum by itself.

Every pass of a step adds to the sums. Writing gradients and adding them in a pass of its own would
move 12 bytes per parameter; fused into the product, that traffic overlaps its arithmetic.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class SummedProduct:
    """`x @ weight.T`; the weight itself gets no gradient."""

    weight: Tensor
    """[outputs, inputs]"""
    total: Tensor
    """[outputs, inputs] float32: what gradients are added to."""

    def __post_init__(self) -> None:
        """Fix the sum's sizes, which are the weight's: nothing compiled then has to ask for
        them."""
        torch._dynamo.mark_static(self.total)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [rows, inputs]"""
        return _product(x, self.weight, self.total)


# As operators that the compiler does not look into: layers stay one graph around them. Autograd
# holds a sum as a pass's input and must not see that it changes before that pass's gradient:
# `.data` hides it here, and in compiled layers the compiler does by writing in place.
@torch.library.custom_op("peagle::product", mutates_args=())
def _product(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    return F.linear(x, weight)


@_product.register_fake
def _(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
    torch._check(x.shape[1] == weight.shape[1])
    return x.new_empty(x.shape[0], weight.shape[0])


def _add_gradient(total: Tensor, gradient: Tensor, x: Tensor) -> None:
    total = total.data
    if total.is_cuda:
        torch.addmm(total, gradient.mT, x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(gradient.float().mT, x.float())


torch.library.define("peagle::add_gradient", "(Tensor(a!) total, Tensor gradient, Tensor x) -> ()")
torch.library.impl("peagle::add_gradient", ("cpu", "cuda"), _add_gradient)
torch.library.register_fake("peagle::add_gradient", lambda total, gradient, x: None)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
    x, weight, total = ctx.saved_tensors
    torch.ops.peagle.add_gradient(total, gradient, x)
    return gradient @ weight if ctx.needs_input_grad[0] else None, None, None


_product.register_autograd(_backward, setup_context=_keep)

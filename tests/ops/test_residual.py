"""Which kernel a layer's parts are given to, where one is chosen by sizes."""

import torch

from peagle.ops import residual
from peagle.ops.linear import Linear
from peagle.ops.products.normed import Normed


def test_a_product_with_a_bias_is_rounded_once() -> None:
    torch.manual_seed(0)
    layer = Linear(64, 96, bias=True).bfloat16().requires_grad_(False)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias, std=8)
    x = torch.randn(40, 64).bfloat16()
    found = residual.linear(Normed(x, None, 1e-6), layer)
    exact = (x.double() @ layer.weight.double().T + layer.bias.double()).bfloat16()
    assert (found == exact).double().mean() > 0.99


def test_a_weight_that_is_laid_out_is_used() -> None:
    """A drafter's head, too: the plain product takes eight times as long on a CPU."""
    layer = Linear(64, 96).requires_grad_(False)
    layer.packed = lambda x: x.repeat(1, 2)[:, :96]
    x = torch.randn(3, 64)
    assert torch.equal(residual.linear(Normed(x, None, 1e-6), layer), layer(x))

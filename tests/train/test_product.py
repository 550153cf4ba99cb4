"""Products that add their weights' gradients to a sum: as torch does, once for every pass."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from peagle.train.product import SummedProduct

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
COMPILED = [False, *([True] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_result_and_gradients_are_torchs(device: str):
    x, weight, of_result, total = drawn(device)
    expected_x, expected_weight = (part.detach().clone().requires_grad_() for part in (x, weight))
    expected = F.linear(expected_x, expected_weight)
    expected.backward(of_result)
    x.requires_grad_()
    result = SummedProduct(weight, total)(x)
    result.backward(of_result)
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(x.grad, expected_x.grad)
    torch.testing.assert_close(total, expected_weight.grad.float(), rtol=1e-2, atol=1e-2)
    assert weight.grad is None


def test_passes_add_up_in_float32():
    """The second, whose gradient comes first, adds less than a bfloat16 sum would keep."""
    x, weight, of_result, total = drawn("cpu")
    product = SummedProduct(weight, total)
    passes = [(product(x), scale) for scale in (1.0, 2.0**-12)]
    for result, scale in reversed(passes):
        result.backward(of_result * scale)
    once = of_result.float().mT @ x.float()
    torch.testing.assert_close(total, once * (1 + 2.0**-12), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("compiled", COMPILED)
def test_an_input_that_needs_no_gradient_is_given_none(compiled: bool):
    device = DEVICES[-1]
    x, weight, of_result, total = drawn(device)
    layer = Scaled(SummedProduct(weight, total)).to(device)
    call = torch.compile(layer, dynamic=True) if compiled else layer
    for rows in (9, 5):
        call(x[:rows]).backward(of_result[:rows])
    wanted = sum(of_result[:rows].float().mT @ x[:rows].float() for rows in (9, 5))
    torch.testing.assert_close(total, 2 * wanted, rtol=1e-2, atol=1e-2)


class Scaled(nn.Module):
    """Something trained after the product."""

    def __init__(self, product: SummedProduct) -> None:
        super().__init__()
        self.product, self.scale = product, nn.Parameter(torch.full((1,), 2.0).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x * 1) * self.scale


def drawn(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Nine inputs and a weight in bfloat16, a gradient of the result, and a sum of zero."""
    torch.manual_seed(0)
    sizes = (9, 32), (16, 32), (9, 16)
    x, weight, of_result = (torch.randn(size).bfloat16().to(device) for size in sizes)
    return x, weight.requires_grad_(), of_result, torch.zeros(16, 32, device=device)

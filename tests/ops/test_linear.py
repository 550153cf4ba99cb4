import pytest
import torch
from torch.nn import functional as F

from peagle.ops.linear import Linear
from peagle.ops.products.packed import HALF_STEP, fits_half

ROWS = [0, 1, 2, 7, 32, 33, 100]


def made(numbers: torch.dtype, bias: bool) -> Linear:
    """A float32 layer whose weight's numbers are those of another type, some of them tiny."""
    layer = Linear(48, 80, bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.weight.data[:, 0] *= 2.0**-18
    layer.weight.data = layer.weight.data.to(numbers).float()
    return layer.requires_grad_(False)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("numbers", [torch.float32, torch.bfloat16, torch.float16])
def test_packed_equals_plain_in_float32(rows: int, bias: bool, numbers: torch.dtype):
    layer = made(numbers, bias)
    x = torch.randn(rows, 48)
    wanted = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), wanted, atol=0, rtol=0)
    layer.pack()
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain_in_bfloat16(rows: int, bias: bool):
    layer = made(torch.bfloat16, bias).bfloat16()
    x = torch.randn(rows, 48).bfloat16()
    wanted = F.linear(x, layer.weight, layer.bias)
    layer.pack()
    # a unit in bfloat16's last place at 32
    torch.testing.assert_close(layer(x), wanted, atol=0.13, rtol=0.01)


def test_a_weight_is_laid_out_once():
    layer = made(torch.bfloat16, bias=False)
    layer.pack()
    first = layer.packed
    layer.pack()
    assert layer.packed is first


def test_rows_do_not_depend_on_their_number():
    """So that verifying many rows gives the numbers that decoding one row gives."""
    layer = made(torch.bfloat16, bias=False)
    layer.pack()
    avx2 = torch.backends.cpu.get_cpu_capability() == "AVX2"
    x = torch.randn(200 if avx2 else 40, 48)
    whole = layer(x)
    for rows in range(200) if avx2 else (1, 2, 8, 15):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows


def test_only_weights_that_lose_nothing_fit_half():
    weight = torch.randn(8, 8)
    assert fits_half(weight.bfloat16().float())
    assert fits_half(weight.half().float())
    assert fits_half(torch.full((2, 2), HALF_STEP))
    assert not fits_half(weight)
    assert not fits_half(weight.bfloat16().float() * 2**17)
    assert not fits_half(torch.tensor([[float("nan")]]))

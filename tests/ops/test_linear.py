import pytest
import torch
from torch.nn import functional as F

from peagle.ops.linear import PACKED_ROWS, Linear

ROWS = [0, 1, 2, 7, PACKED_ROWS, PACKED_ROWS + 1, 100]


def made(dtype: torch.dtype, bias: bool) -> Linear:
    layer = Linear(48, 80, bias)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    return layer.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_equals_plain(rows: int, bias: bool, dtype: torch.dtype):
    layer = made(dtype, bias)
    x = torch.randn(rows, 48).to(dtype)
    wanted = F.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(layer(x), wanted, atol=0, rtol=0)
    layer.pack()
    tolerance = 1e-4 if dtype == torch.float32 else 0.13  # a unit in bfloat16's last place at 32
    torch.testing.assert_close(layer(x), wanted, atol=tolerance, rtol=0.01)

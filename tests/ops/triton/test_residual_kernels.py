import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.swiglu import swiglu


def draw(*shape: int, device: torch.device) -> torch.Tensor:
    return torch.randn(*shape, device="cpu").to(device)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("rows", [1, 5, 17, 40])
@pytest.mark.parametrize(("depth", "outputs"), [(256, 96), (400, 48), (2064, 96), (256, 320)])
def test_products_equal_norm_product_and_addition(
    device: torch.device, rows: int, depth: int, outputs: int
) -> None:
    from peagle.ops.triton import few_rows

    x, first = draw(rows, depth, device=device), draw(outputs, depth, device=device)
    stream, scale = draw(rows, outputs, device=device), draw(outputs, device=device)
    bias = draw(outputs, device=device)
    total, scaled, squares = few_rows.add(x, first, bias, stream, scale)
    expected = stream + F.linear(x, first, bias)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)

    second = draw(2 * 24, outputs, device=device)
    normed = rms_norm(expected, scale, 1e-5)
    product = few_rows.linear(scaled, squares, 1e-5, second, None)
    torch.testing.assert_close(product, F.linear(normed, second), rtol=1e-4, atol=1e-4)
    gate, up = F.linear(normed, second).chunk(2, dim=-1)
    swiglu = few_rows.gated(scaled, squares, 1e-5, second)
    torch.testing.assert_close(swiglu, F.silu(gate) * up, rtol=1e-3, atol=1e-4)


def test_products_are_rounded_before_the_gate_is_taken(device: torch.device) -> None:
    """As where they are written first, so that a row is the same on either way."""
    from peagle.ops.triton import few_rows

    x, weight = (torch.randint(-64, 65, size) / 256 for size in ((5, 256), (96, 256)))
    half = torch.float16  # which Triton's interpreter can multiply
    found = few_rows.gated(x.to(device, half), None, 1e-5, weight.to(device, half)).cpu()
    product = F.linear(x, weight)
    assert (found == swiglu(product.to(half).float()).to(half)).float().mean() > 0.99
    assert (found == swiglu(product).to(half)).float().mean() < 0.9


def test_norm_takes_rows_with_a_stride(device: torch.device) -> None:
    from peagle.ops.triton import norm as kernels

    wide, weight = draw(5, 3 * 40, device=device), draw(40, device=device)
    middle = wide[:, 40:80]
    found = kernels.normed(middle, norm_of(weight))
    torch.testing.assert_close(found.x, rms_norm(middle, weight, 1e-6))


def test_add_rms_norm(device: torch.device) -> None:
    from peagle.ops.triton import norm as kernels

    stream, x, weight = (draw(*shape, device=device) for shape in ((5, 48), (5, 48), (48,)))
    total, out = kernels.add_normed(x[:, None], stream, norm_of(weight))
    torch.testing.assert_close(total, stream + x)
    torch.testing.assert_close(out.x, rms_norm(stream + x, weight, 1e-6))


def norm_of(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(len(weight), 1e-6)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm

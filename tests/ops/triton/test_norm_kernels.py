"""Norms with what is around them, products and a sandwich block's additions, against torch's."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops import sandwich, triton
from peagle.ops.moe import ScaledExperts
from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.sandwich import Mixture, MixtureInputs
from peagle.ops.swiglu import GATES

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
EPS = 1e-6
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(3)


def draw(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(*shape, device="cpu").to(device)


def norms_of(count: int, width: int, device: torch.device) -> list[RMSNorm]:
    return [norm_of(width, device) for _ in range(count)]


def mixture_of(width: int, device: torch.device) -> Mixture:
    experts = ScaledExperts(width, 8, 4, 3).requires_grad_(False)
    experts.router_scale.uniform_(0.5, 1.5)
    scalar = torch.tensor([0.7], device=device)
    return Mixture(experts.to(device), *norms_of(4, width, device), scalar)


def norm_of(width: int, device: torch.device, eps: float = EPS) -> RMSNorm:
    norm = RMSNorm(width, eps).requires_grad_(False)
    norm.weight.uniform_(0.5, 1.5)
    return norm.to(device)


@pytest.mark.sweep
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("width", [48, 64, 1100])
@pytest.mark.parametrize("scaled", [False, True])
def test_an_addition_under_its_own_norm(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    fast: bool,
    rows: int,
    width: int,
    scaled: bool,
):
    """The norms differ in their eps, which counts where numbers are small."""
    monkeypatch.setattr(triton, "has_kernels", lambda x: fast)
    product, stream = (draw(device, rows, width) * 1e-2 for _ in range(2))
    own, norm = norm_of(width, device, 1e-3), norm_of(width, device, 1e-2)
    scalar = torch.tensor([0.7], device=device) if scaled else None
    total, under = sandwich.add(product, own, stream, norm, scalar)
    expected = (stream + rms_norm(product, own.weight, 1e-3)) * (0.7 if scaled else 1)
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(under.x, rms_norm(expected, norm.weight, 1e-2), **CLOSE)
    assert under.squares is None


@pytest.mark.sweep
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (7, 64), (3, 1100)])
def test_what_a_mixture_reads(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, fast: bool, rows: int, width: int
):
    monkeypatch.setattr(triton, "has_kernels", lambda x: fast)
    product, stream = (draw(device, rows, width) for _ in range(2))
    own, norm, mixture = *norms_of(2, width, device), mixture_of(width, device)
    total, inputs = sandwich.add_before_mixture(product, own, stream, norm, mixture)
    expected = stream + rms_norm(product, own.weight, EPS)
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(inputs.dense.x, rms_norm(expected, norm.weight, EPS), **CLOSE)
    read = rms_norm(expected, mixture.input_norm.weight, EPS)
    torch.testing.assert_close(inputs.experts, read, **CLOSE)
    routed = rms_norm(expected, mixture.experts.router_scale, EPS) / width**0.5
    torch.testing.assert_close(inputs.router, routed, **CLOSE)


@pytest.mark.sweep
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 48), (7, 64), (3, 1100)])
def test_an_addition_of_mlp_and_experts(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, fast: bool, rows: int, width: int
):
    monkeypatch.setattr(triton, "has_kernels", lambda x: fast)
    monkeypatch.setattr(ScaledExperts, "summands", lambda self, x, routed: summands)
    dense, stream, x = (draw(device, rows, width) for _ in range(3))
    summands, (norm,) = draw(device, rows, 3, width), norms_of(1, width, device)
    mixture, inputs = mixture_of(width, device), MixtureInputs(Normed(x, None, EPS), x, x)
    total, under = sandwich.add_mixture(dense, inputs, mixture, stream, norm)
    given = rms_norm(dense, mixture.dense_norm.weight, EPS)
    given = given + rms_norm(summands.sum(dim=1), mixture.experts_norm.weight, EPS)
    expected = (stream + rms_norm(given, mixture.norm.weight, EPS)) * mixture.scalar
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(under.x, rms_norm(expected, norm.weight, EPS), **CLOSE)


@on_a_gpu
def test_an_addition_in_bfloat16_is_rounded_as_the_reference_is():
    """Up to the product's norm, which is rounded once where torch rounds it twice."""
    gpu = torch.device("cuda")
    product, stream = (draw(gpu, 8, 5376).bfloat16() for _ in range(2))
    own, norm = (norm_of(5376, gpu).bfloat16() for _ in range(2))
    scalar = torch.tensor([0.7], device=gpu).bfloat16()
    total, _ = sandwich.add(product, own, stream, norm, scalar)
    given = rms_norm(product.float(), own.weight.float(), 1e-6).bfloat16()
    assert (total == (stream + given) * scalar).float().mean() > 0.99


@pytest.mark.parametrize("rows", [1, 5, 17, 40])
@pytest.mark.parametrize(("depth", "outputs"), [(256, 96), (400, 48), (2064, 96), (256, 320)])
def test_products_equal_norm_product_and_addition(
    device: torch.device, rows: int, depth: int, outputs: int
) -> None:
    from peagle.ops.triton import few_rows

    x, first = draw(device, rows, depth), draw(device, outputs, depth)
    stream, scale = draw(device, rows, outputs), draw(device, outputs)
    bias = draw(device, outputs)
    total, scaled, squares = few_rows.add(x, first, bias, stream, scale)
    expected = stream + F.linear(x, first, bias)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)

    second = draw(device, 2 * 24, outputs)
    normed = rms_norm(expected, scale, 1e-5)
    product = few_rows.linear(scaled, squares, 1e-5, second, None)
    torch.testing.assert_close(product, F.linear(normed, second), rtol=1e-4, atol=1e-4)
    for gate, gated in GATES.items():
        found = few_rows.gated(scaled, squares, 1e-5, second, gate)
        torch.testing.assert_close(found, gated(F.linear(normed, second)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gate", GATES)
def test_products_are_rounded_before_the_gate_is_taken(
    device: torch.device, gate: Epilogue
) -> None:
    """As where they are written first, so that a row is the same on either way."""
    from peagle.ops.triton import few_rows

    x, weight = (torch.randint(-64, 65, size) / 256 for size in ((5, 256), (96, 256)))
    half = torch.float16  # which Triton's interpreter can multiply
    given = x.to(device, half), None, 1e-5, weight.to(device, half)
    found = few_rows.gated(*given, gate).cpu()
    product = F.linear(x, weight)
    assert (found == GATES[gate](product.to(half).float()).to(half)).float().mean() > 0.99
    assert (found == GATES[gate](product).to(half)).float().mean() < 0.9


def test_norm_takes_rows_with_a_stride(device: torch.device) -> None:
    from peagle.ops.triton import norm as kernels

    wide, norm = draw(device, 5, 3 * 40), norm_of(40, device)
    middle = wide[:, 40:80]
    found = kernels.normed(middle, norm)
    torch.testing.assert_close(found.x, rms_norm(middle, norm.weight, EPS))


def test_add_rms_norm(device: torch.device) -> None:
    from peagle.ops.triton import norm as kernels

    stream, x, norm = draw(device, 5, 48), draw(device, 5, 48), norm_of(48, device)
    total, out = kernels.add_normed(x[:, None], stream, norm)
    torch.testing.assert_close(total, stream + x)
    torch.testing.assert_close(out.x, rms_norm(stream + x, norm.weight, EPS))

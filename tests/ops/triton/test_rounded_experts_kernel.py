"""Experts in FP8 on both sides, against the same with rounded numbers in float32."""

import pytest
import torch
from test_quantized_kernels import expert_weights
from torch import Tensor
from torch.nn import functional as F

from peagle.ops import moe as reference
from peagle.ops.moe import Clamped
from peagle.ops.quantized_activations import quantize
from peagle.ops.swiglu import swiglu
from peagle.ops.weight import Fp8Weight, keep_activations

EXPERTS, TOP_K, HIDDEN = 6, 2, 256
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def dynamic(form: str, inner: int, device: torch.device) -> list[Fp8Weight]:
    """Gate and up, and down, of a checkpoint that is made for rounded inputs."""
    weights = [weight.to(device) for weight in expert_weights(form, EXPERTS, HIDDEN, inner)]
    for weight in weights:
        weight.dynamic_activations = True
    return weights


def rounded(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Rows as a product with a weight sees them."""
    group, run = min(weight.block[1], x.shape[1]), weight.run
    inputs = quantize(x.cpu(), group, run)
    numbers = inputs.numbers.float() * inputs.scales.repeat_interleave(group, 1)
    pairs = numbers[: len(x)].unflatten(1, (-1, run // 2, 2)).transpose(-1, -2)
    return pairs.flatten(1).to(x)


def expected(x: Tensor, router: Tensor, gate_up: Fp8Weight, down: Fp8Weight) -> Tensor:
    """`moe` with both products' inputs rounded."""
    weights, chosen = reference.route(x, router, TOP_K, normalize=True)
    result, given = torch.zeros_like(x), rounded(x, gate_up)
    for row, choice in [(row, choice) for row in range(len(x)) for choice in range(TOP_K)]:
        expert = int(chosen[row, choice])
        inner = swiglu(F.linear(given[row : row + 1], gate_up[expert].dense()))
        outputs = F.linear(rounded(inner, down), down[expert].dense())
        result[row] += weights[row, choice] * outputs[0]
    return result


@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("inner", [128, 384])
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_experts_of_rounded_inputs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, rows: int, inner: int, form: str
):
    from peagle.ops.triton import moe as kernels

    monkeypatch.setattr(kernels.rounded, "takes", lambda *_: True)
    router = (torch.randn(EXPERTS, HIDDEN) * HIDDEN**-0.5).to(device)
    weights = dynamic(form, inner, device)
    x = torch.randn(rows, HIDDEN).to(device)
    found = kernels.moe(x, router, *weights, TOP_K, True)
    wanted = expected(x, router, *weights)
    # where sums differ in their last bits, a number between two may be rounded to the other one
    error = (found - wanted).norm() / wanted.norm()
    assert error < 2e-3


def test_few_rows_keep_their_activations(monkeypatch: pytest.MonkeyPatch):
    """And so do weights that no one said are made for it, biased and other types of experts."""
    from peagle.ops.triton import rounded_experts as kernels

    gate_up, down = dynamic("blocks", 128, torch.device("cpu"))
    many, few = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16) for rows in (129, 128))
    assert not kernels.takes(many, gate_up, down)  # no GPU
    monkeypatch.setattr(kernels, "on_hopper", lambda x: True)
    assert kernels.takes(many, gate_up, down)
    assert not kernels.takes(few, gate_up, down)
    assert not kernels.takes(many.float(), gate_up, down)
    assert not kernels.takes(many, gate_up.dense(), down.dense())
    assert not kernels.takes(many, *expert_weights("mxfp4", EXPERTS, HIDDEN, 128))
    assert not kernels.takes(many, *dynamic("rows", 192, torch.device("cpu")))
    layer = torch.nn.ModuleList([gate_up, down])
    keep_activations(layer)
    assert not kernels.takes(many, gate_up, down)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_neither_biases_nor_one_order_of_sums_go_with_rounding(
    monkeypatch: pytest.MonkeyPatch, batch_invariant: bool
):
    from peagle.ops.triton import moe as kernels

    monkeypatch.setattr(kernels.rounded, "takes", lambda *_: True)
    monkeypatch.setattr(kernels.rounded, "gate_up", lambda *_: pytest.fail("rounds"))
    weights = dynamic("blocks", 128, torch.device("cpu"))
    biases = torch.zeros(EXPERTS), torch.zeros(EXPERTS, 256), torch.zeros(EXPERTS, HIDDEN)
    clamped = None if batch_invariant else Clamped(*biases, 7.0)
    form = torch.randn(EXPERTS, HIDDEN), *weights, TOP_K, True
    kernels.moe(torch.randn(3, HIDDEN), *form, clamped, batch_invariant)


@on_a_gpu
@pytest.mark.parametrize("rows", [129, 512, 3000])
@pytest.mark.parametrize("form", ["rows", "blocks"])
def test_many_rows_are_near_what_exact_ones_give(device: torch.device, rows: int, form: str):
    from peagle.ops.triton import moe as kernels

    router = (torch.randn(EXPERTS, HIDDEN) * HIDDEN**-0.5).to(device, torch.bfloat16)
    weights = dynamic(form, 384, device)
    x = torch.randn(rows, HIDDEN).to(device, torch.bfloat16)
    found = kernels.moe(x, router, *weights, TOP_K, True)
    keep_activations(torch.nn.ModuleList(weights))
    exact = kernels.moe(x, router, *weights, TOP_K, True)
    assert not torch.equal(found, exact)
    error = (found - exact).float().norm() / exact.float().norm()
    assert error < 0.06

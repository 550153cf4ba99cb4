"""Gemma 4's experts by the kernels of mixtures, against torch's."""

import pytest
import torch
from test_quantized_kernels import fp8_weight
from torch import Tensor

from peagle.ops import triton
from peagle.ops.moe import ExpertWeights, ScaledExperts

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def made(hidden: int, inner: int, experts: int, top_k: int) -> ScaledExperts:
    module = ScaledExperts(hidden, inner, experts, top_k).requires_grad_(False)
    for weight in (module.router, module.gate_up, module.down):
        weight.normal_(std=weight.shape[-1] ** -0.5)
    module.router.mul_(hidden**0.5)  # which the router's input is divided by
    module.router_scale.uniform_(0.5, 1.5)
    module.factors.uniform_(0.2, 2.0)
    return module


def both(module: ScaledExperts, x: Tensor, routed: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels and what torch give."""
    from peagle.ops.triton import moe as kernels

    given = module.router, module.gate_up, module.down, module.top_k, True
    weights = ExpertWeights(*given, factors=module.factors)
    found = kernels.summands(x, weights, module.scaled(routed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "has_kernels", lambda x: False)
        return found, module(x, routed)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [0, 1, 5, 17, 40])
@pytest.mark.parametrize(("experts", "top_k"), [(6, 2), (5, 5), (24, 4), (1, 1)])
def test_any_rows_and_experts(device: torch.device, rows: int, experts: int, top_k: int):
    """Of rows that choose their experts by something else than themselves."""
    x, routed = (torch.randn(rows, 40).to(device) for _ in range(2))
    found, expected = both(made(40, 17, experts, top_k).to(device), x, routed)
    assert found.shape == (rows, top_k, 40)
    torch.testing.assert_close(found.sum(dim=1), expected, **CLOSE)


@pytest.mark.sweep
@pytest.mark.parametrize("rows", [1, 7, 40])
@pytest.mark.parametrize("block", [None, (128, 128)])
def test_packed_weights(device: torch.device, rows: int, block: tuple[int, int] | None):
    dense, packed = made(128, 256, 6, 2), made(128, 256, 6, 2)
    for name in ("gate_up", "down"):
        weight = fp8_weight(*getattr(dense, name).shape, block=block)
        getattr(dense, name).copy_(weight.dense())
        delattr(packed, name)
        setattr(packed, name, weight.to(device))
    for name in ("router", "router_scale", "factors"):
        getattr(packed, name).copy_(getattr(dense, name))
    x, routed = torch.randn(rows, 128).to(device) * 0.1, torch.randn(rows, 128).to(device)
    found, _ = both(packed.to(device), x, routed)
    _, expected = both(dense.to(device), x, routed)
    scale = expected.abs().max()
    torch.testing.assert_close(found.sum(dim=1) / scale, expected / scale, atol=2e-5, rtol=2e-5)


def test_the_module_takes_the_kernels_where_they_serve(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    module, x, routed = made(40, 24, 8, 3).to(device), *torch.randn(2, 4, 40).to(device)
    found, expected = both(module, x, routed)
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    assert torch.equal(module(x, routed), found.sum(dim=1))
    torch.testing.assert_close(module(x, routed), expected, **CLOSE)


def test_warming_up_meets_the_sizes_of_tiles_that_passes_reach(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    from peagle.ops.triton import moe as kernels

    met, block_for = set(), kernels.block_for
    monkeypatch.setattr(
        kernels, "block_for", lambda *args: met.add(block_for(*args)) or block_for(*args)
    )
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    made(16, 8, 8, 2).to(device).half().warm_up(200)
    assert met == {32, 64}


@on_a_gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 500])
def test_bfloat16_at_a_real_model_s_sizes(rows: int):
    gpu = torch.device("cuda")
    module = made(2816, 704, 128, 8).to(gpu, torch.bfloat16)
    x, routed = (torch.randn(rows, 2816).to(gpu, torch.bfloat16) for _ in range(2))
    found, expected = both(module, x, routed)
    torch.testing.assert_close(found.sum(dim=1), expected, atol=0.03, rtol=0.03)

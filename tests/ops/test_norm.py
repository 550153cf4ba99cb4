import pytest
import torch

from peagle.ops.norm import RMSNorm, rms_norm


def by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 16)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("grad", [False, True])
def test_both_paths_equal_the_definition(shape: tuple[int, ...], scale: float, grad: bool):
    """Without gradients the CPU takes a path with fewer launches."""
    x = torch.randn(shape) * scale
    weight = torch.rand(shape[-1]) + 0.5
    with torch.set_grad_enabled(grad):
        result = rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(
        result.double(), by_definition(x, weight, 1e-6), atol=1e-6, rtol=1e-5
    )


def test_the_input_stays_as_it_was():
    x = torch.randn(2, 8)
    before = x.clone()
    with torch.no_grad():
        rms_norm(x, torch.ones(8), 1e-6)
    assert torch.equal(x, before)


def test_a_weight_for_every_head():
    x, weight = torch.randn(5, 3, 8), torch.rand(3, 8)
    with torch.no_grad():
        result = rms_norm(x, weight, 1e-5)
    for head in range(3):
        torch.testing.assert_close(result[:, head], rms_norm(x[:, head], weight[head], 1e-5))


def test_bfloat16_keeps_its_type():
    norm = RMSNorm(32, 1e-6).bfloat16()
    x = torch.randn(4, 32).bfloat16()
    result = norm(x)
    assert result.dtype == torch.bfloat16
    wanted = by_definition(x, norm.weight, 1e-6).to(torch.bfloat16)
    torch.testing.assert_close(result, wanted, atol=0.02, rtol=0.01)

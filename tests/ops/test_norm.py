import pytest
import torch

from peagle.ops.norm import HeadNorm, RMSNorm, fold, rms_norm


def by_definition(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x, weight = x.double(), weight.double()
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("shape", [(1, 8), (5, 64), (3, 4, 16)])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1.0, 1e4])
def test_plain_and_folded_equal_the_definition(shape: tuple[int, ...], scale: float):
    x = torch.randn(shape) * scale
    before = x.clone()
    weight = torch.rand(shape[1:]) + 0.5
    folded = fold(weight, 1e-6)
    assert folded is not None
    for result in (rms_norm(x, weight, 1e-6), folded(x)):
        torch.testing.assert_close(
            result.double(), by_definition(x, weight, 1e-6), atol=1e-6, rtol=1e-5
        )
    assert torch.equal(x, before)


def test_queries_and_keys_have_a_weight_each():
    norm = HeadNorm(heads=3, kv_heads=2, head_dim=8, eps=1e-5)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(4, 5, 8)
    query, key = norm.weight.view(2, 8)
    wanted = torch.cat((rms_norm(x[:, :3], query, 1e-5), rms_norm(x[:, 3:], key, 1e-5)), dim=1)
    torch.testing.assert_close(norm(x), wanted)
    norm.pack()
    torch.testing.assert_close(norm(x), wanted)


def test_bfloat16_keeps_its_type():
    norm = RMSNorm(32, 1e-6).bfloat16()
    norm.pack()
    x = torch.randn(4, 32).bfloat16()
    result = norm(x)
    assert result.dtype == torch.bfloat16
    wanted = by_definition(x, norm.weight, 1e-6).to(torch.bfloat16)
    torch.testing.assert_close(result, wanted, atol=0.02, rtol=0.01)

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from peagle.train.lookup import lookup

ROWS = torch.tensor([3, 1, 3, 7, 3])


def table(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(9, 4, dtype=dtype))


def learnt(found: Tensor, weights: nn.Parameter) -> Tensor:
    """Its gradient under a fixed direction."""
    torch.manual_seed(1)
    found.backward(torch.randn_like(found))
    assert weights.grad is not None
    return weights.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_their_gradient_are_torchs(dtype: torch.dtype):
    """Also for rows that are read several times."""
    ours, reference = table(dtype), table(dtype)
    found, expected = lookup(ours, ROWS), F.embedding(ROWS, reference)
    assert torch.equal(found, expected)
    torch.testing.assert_close(learnt(found, ours), learnt(expected, reference))


def test_uses_add_up_where_the_gradient_is():
    ours, reference = table(), table()
    first = learnt(lookup(ours, ROWS), ours)
    assert learnt(lookup(ours, ROWS + 1), ours) is first
    for rows in (ROWS, ROWS + 1):
        learnt(F.embedding(rows, reference), reference)
    torch.testing.assert_close(first, reference.grad)


def test_frozen_tables_have_none():
    frozen = table().requires_grad_(False)
    assert not lookup(frozen, ROWS).requires_grad

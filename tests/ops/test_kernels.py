"""When a kernel takes the place of an op's reference."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from peagle.ops import triton


def test_no_kernel_takes_the_place_of_what_needs_a_gradient(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    monkeypatch.setattr(triton, "kernels", lambda name: SimpleNamespace(twice=torch.zeros_like))

    @triton.in_kernels("any")
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    x = torch.ones(3)
    assert twice(x).sum() == 0
    x.requires_grad_()
    twice(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        assert twice(x).sum() == 0

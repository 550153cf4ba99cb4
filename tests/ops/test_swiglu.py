import torch

from peagle.ops.swiglu import gradient, swiglu


def test_its_gradient_is_its_derivative():
    torch.manual_seed(0)
    gate_up = torch.randn(5, 14, dtype=torch.float32, requires_grad=True)
    given = torch.randn(5, 7)
    (wanted,) = torch.autograd.grad(swiglu(gate_up), gate_up, given)
    torch.testing.assert_close(gradient(gate_up.detach(), given), wanted)

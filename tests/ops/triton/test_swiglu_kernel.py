"""SwiGLU and its gradient, and GEGLU, against torch's."""

import pytest
import torch

from peagle.ops import swiglu as plain
from peagle.ops import triton
from peagle.ops.triton import swiglu as kernels

CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}


@pytest.mark.parametrize("width", [7, 64, 1024, 2500])
@pytest.mark.parametrize("dtype", CLOSE)
def test_it_is_the_reference(device: torch.device, width: int, dtype: torch.dtype):
    gate_up, _ = drawn(width, dtype)
    found = kernels.swiglu(gate_up.to(device))
    torch.testing.assert_close(found.cpu(), plain.swiglu(gate_up), **CLOSE[dtype])


@pytest.mark.parametrize("width", [7, 64, 1024, 2500])
@pytest.mark.parametrize("dtype", CLOSE)
def test_geglu_is_the_reference(device: torch.device, width: int, dtype: torch.dtype):
    gate_up, _ = drawn(width, dtype)
    expected = plain.geglu(gate_up)
    found = kernels.geglu(gate_up.to(device))
    torch.testing.assert_close(found.cpu(), expected, **CLOSE[dtype])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's exp is numpy's
def test_a_gate_of_any_size_is_still_a_number_under_gelu(device: torch.device):
    gates = torch.tensor([[0.0, 1e-30, -1e-30, 30.0, -30.0, 1e4, -1e4, 1e20, -1e20]])
    gate_up = torch.cat((gates, torch.ones_like(gates)), dim=1)
    found = kernels.geglu(gate_up.to(device)).cpu()
    torch.testing.assert_close(found, plain.geglu(gate_up))


def test_geglu_takes_the_kernel_where_no_gradient_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton, "has_kernels", lambda x: True)
    launched = []
    monkeypatch.setattr(kernels, "geglu", lambda x: launched.append(x) or x)
    gate_up, _ = drawn(8, torch.float32)
    with torch.no_grad():
        assert plain.geglu(gate_up) is gate_up
    given = gate_up.clone().requires_grad_()
    plain.geglu(given).sum().backward()
    assert len(launched) == 1
    assert given.grad is not None


@pytest.mark.parametrize("width", [7, 64, 1024, 2500])
@pytest.mark.parametrize("dtype", CLOSE)
def test_the_gradient_is_the_references(device: torch.device, width: int, dtype: torch.dtype):
    gate_up, of_result = drawn(width, dtype)
    found = kernels.gradient(gate_up.to(device), of_result.to(device))
    torch.testing.assert_close(found.cpu(), gradient(gate_up, of_result), **CLOSE[dtype])


def test_rows_that_do_not_lie_in_a_row_are_read_as_they_are(device: torch.device):
    gate_up, of_result = drawn(24, torch.float32)
    apart = gate_up.to(device).mT.contiguous().mT
    found = kernels.gradient(apart, of_result.to(device).mT.contiguous().mT)
    torch.testing.assert_close(found.cpu(), gradient(gate_up, of_result))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="asks for a GPU")
def test_on_a_gpu_gradients_come_from_the_kernel_compiled_or_not():
    gate_up, of_result = (part.cuda() for part in drawn(64, torch.float32))
    expected = gradient(gate_up, of_result)
    for call in (plain.swiglu, torch.compile(plain.swiglu, dynamic=True)):
        given = gate_up.clone().requires_grad_()
        call(given).backward(of_result)
        torch.testing.assert_close(given.grad, expected)


def gradient(gate_up: torch.Tensor, of_result: torch.Tensor) -> torch.Tensor:
    """Torch's, taken in float32 on the CPU."""
    given = gate_up.float().cpu().requires_grad_()
    plain.swiglu(given).backward(of_result.float().cpu())
    return given.grad.to(gate_up)


def drawn(width: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up of 9 rows, and a gradient of the result."""
    torch.manual_seed(width)
    return torch.randn(9, 2 * width).to(dtype), torch.randn(9, width).to(dtype)

"""Gates of MLPs: SwiGLU, and GEGLU, which Gemma has."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.products.product import Epilogue
from peagle.ops.triton import has_kernels, in_kernels, kernels


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [rows, 2 * width], gate and up side by side: [rows, width]."""
    if has_kernels(gate_up) and torch.is_grad_enabled():
        return _swiglu(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


# As operators: the gradient that the compiler writes reads everything once for each half.
@torch.library.custom_op("peagle::swiglu", mutates_args=())
def _swiglu(gate_up: Tensor) -> Tensor:
    return kernels("swiglu").swiglu(gate_up)


@_swiglu.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@torch.library.custom_op("peagle::swiglu_gradient", mutates_args=())
def _gradient(gate_up: Tensor, of_result: Tensor) -> Tensor:
    return kernels("swiglu").gradient(gate_up, of_result)


@_gradient.register_fake
def _(gate_up: Tensor, of_result: Tensor) -> Tensor:
    return torch.empty_like(gate_up)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, of_result: Tensor) -> Tensor:
    return _gradient(*ctx.saved_tensors, of_result)


_swiglu.register_autograd(_backward, setup_context=_keep)


@in_kernels("swiglu")
def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [rows, 2 * width], gate and up side by side: [rows, width].

    GELU is approximated by tanh.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


GATES = {Epilogue.GATE: swiglu, Epilogue.GELU_GATE: geglu}
"""What each gate makes of a product."""

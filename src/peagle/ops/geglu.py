"""GEGLU, the gate of Gemma's MLPs."""

from torch import Tensor
from torch.nn import functional as F

from peagle.ops.triton import in_kernels


@in_kernels("swiglu")
def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up of [rows, 2 * width], gate and up side by side: [rows, width].

    GELU is approximated by tanh.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up

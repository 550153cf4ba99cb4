"""Triton kernels: same names and signatures as the torch references one folder up."""

import importlib.util

from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None


def serve(x: Tensor) -> bool:
    """Whether the kernels compute on this tensor's device."""
    return AVAILABLE and x.is_cuda

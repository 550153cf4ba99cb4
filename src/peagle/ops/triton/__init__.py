"""Triton kernels: same names and signatures as the torch references one folder up."""

import functools
import importlib
import importlib.util
from types import ModuleType

from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None


def serve(x: Tensor) -> bool:
    """Whether the kernels compute on this tensor's device."""
    return AVAILABLE and x.is_cuda


@functools.cache
def kernels(name: str) -> ModuleType:
    """The kernels of an op, imported where a GPU first asks for them."""
    return importlib.import_module(f"{__name__}.{name}")

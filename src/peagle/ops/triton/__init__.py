"""Triton kernels: same names and signatures as the torch references one folder up."""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch
from torch import Tensor

AVAILABLE = importlib.util.find_spec("triton") is not None
HOPPER = 9
"""Its compute capability."""


def has_kernels(x: Tensor) -> bool:
    """Whether the kernels compute on this tensor's device."""
    return AVAILABLE and x.is_cuda


def on_hopper(x: Tensor) -> bool:
    """Whether they do, on a GPU with what only Hopper has."""
    return has_kernels(x) and torch.cuda.get_device_capability(x.device)[0] == HOPPER


@functools.cache
def kernels(name: str) -> ModuleType:
    """The kernels of an op, imported where a GPU first asks for them."""
    return importlib.import_module(f"{__name__}.{name}")

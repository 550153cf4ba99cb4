"""GPU kernels behind the signatures of the torch references one folder up, by `kernels(name)`.

Beside those: `few_rows`, products of tensors (`residual`) and packed weights (`quantized_product`);
`layer_chain`, a faster form of what they do; `hopper_attention`, one of `cached_attention`;
`tiles`, how products of few rows are cut; `launch`, how kernels follow one another.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

AVAILABLE = importlib.util.find_spec("triton") is not None
HOPPER = 9
"""Its compute capability."""


def has_kernels(x: Tensor) -> bool:
    """Whether x is on a GPU, and Triton is there."""
    return AVAILABLE and x.is_cuda


def on_hopper(x: Tensor) -> bool:
    """Whether x is on a Hopper GPU, and Triton is there."""
    return has_kernels(x) and torch.cuda.get_device_capability(x.device)[0] == HOPPER


def in_kernels(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes of a reference an op: where its first tensor is on a GPU, the function of its name
    among some kernels is called in its place."""

    def op(reference: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(reference)
        def call(*args: P.args, **named: P.kwargs) -> T:
            if has_kernels(cast(Tensor, args[0])):
                return getattr(kernels(name), reference.__name__)(*args, **named)
            return reference(*args, **named)

        return call

    return op


@functools.cache
def kernels(name: str) -> ModuleType:
    """The kernels of an op, imported when first asked for."""
    return importlib.import_module(f"{__name__}.{name}")

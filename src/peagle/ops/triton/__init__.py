"""GPU kernels behind the signatures of the torch references one folder up.

Some modules stand for no reference of that name: `few_rows` multiplies few rows by weights of any
format (`skinny_product`, and `hopper_product` for packed weights: more rows, and up to eight of
four bits), `layer_chain` does four such products in one launch, `hopper_attention` does faster what
`cached_attention` does, `tiles` says how products of few rows are cut, `launch` how kernels follow
one another.

An op says beside its reference, by `in_kernels`, when a kernel takes its place; `products.choice`
does so for products. Nothing else asks where a tensor is.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

AVAILABLE = importlib.util.find_spec("triton") is not None
HOPPER = 9
"""The compute capability of Hopper GPUs."""


def has_kernels(x: Tensor) -> bool:
    """Whether x is on a GPU, and Triton is there."""
    return AVAILABLE and x.is_cuda


def on_hopper(x: Tensor) -> bool:
    """Whether x is on a Hopper GPU, and Triton is there."""
    there = AVAILABLE and x.is_cuda
    return there and torch.cuda.get_device_capability(x.device)[0] == HOPPER


@dataclass(frozen=True)
class Kernels:
    """Kernels of a module, and when they are chosen."""

    name: str
    """The name of the module."""
    when: Callable[..., bool] | None = None
    """Whether the kernels take some arguments, which follow the module; None: they take all."""
    hopper: bool = False
    """Whether only a Hopper GPU runs the kernels."""

    def chosen(self, *args: Any) -> ModuleType | None:
        """The module, where it takes arguments of which the first tensor is on a GPU, and needs no
        gradient, which no kernel has."""
        there, first = on_hopper if self.hopper else has_kernels, _first_tensor(args)
        if not there(first) or (first.requires_grad and torch.is_grad_enabled()):
            return None
        module = kernels(self.name)
        return module if self.when is None or self.when(module, *args) else None

    def op(self, reference: Callable[P, T]) -> Callable[P, T]:
        """Make an op of a reference: where the kernels are chosen, their function of its name is
        called in place of the reference."""

        @functools.wraps(reference)
        def call(*args: P.args, **named: P.kwargs) -> T:
            module = self.chosen(*args)
            chosen = reference if module is None else getattr(module, reference.__name__)
            return chosen(*args, **named)

        return call


def in_kernels(
    name: str, when: Callable[..., bool] | None = None, hopper: bool = False
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """The decorator `Kernels.op` of kernels with these fields."""
    return Kernels(name, when, hopper).op


def _first_tensor(args: Iterable[Any]) -> Tensor:
    """The first tensor among arguments, or in a tuple among them."""
    flat = (x for arg in args for x in (arg if isinstance(arg, tuple) else (arg,)))
    return next(x for x in flat if isinstance(x, Tensor))


@functools.cache
def kernels(name: str) -> ModuleType:
    """The kernels of an op, imported when first asked for."""
    return importlib.import_module(f"{__name__}.{name}")

"""Modules whose calls cost little, and weights laid out once for inference."""

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class LeanModule(nn.Module):
    """A module inside a layer: called directly, without torch's hooks.

    A cycle makes some 170 such calls, and looking for hooks takes about as long as a small product.
    """

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)


class Packable(LeanModule, ABC):
    """A module with a faster form for weights that no longer change."""

    @abstractmethod
    def pack(self) -> None:
        """Lay the weights out for inference; from here on they must stay as they are."""


def pack(module: nn.Module) -> None:
    """Pack every part of a module that will only run inference from here on."""
    for child in module.modules():
        if isinstance(child, Packable):
            child.pack()

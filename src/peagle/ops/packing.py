"""Weights laid out once for inference."""

from torch import nn


class Packable(nn.Module):
    """A module with a faster form for weights that no longer change."""

    def pack(self) -> None:
        """Lay the weights out for inference; from here on they must stay as they are."""
        raise NotImplementedError


def pack(module: nn.Module) -> None:
    """Pack every part of a module that will only run inference from here on."""
    for child in module.modules():
        if isinstance(child, Packable):
            child.pack()

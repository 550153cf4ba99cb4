"""Tiles and rings for small batches, chosen by whole cycles' time at the first start on a GPU."""

import warnings
from typing import Protocol

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from peagle.ops.triton.tiles import APART, Asked, Chain, Choice, Tiles, candidates

LEAST_SHARE = 0.05
"""Of a cycle's weights: products with less are left to a size in which they have more, and without
one keep what was best on an H200."""
FASTER = 0.997
"""What noise does not do."""


class Cycles(Protocol):
    """Cycles of several sizes, run for nobody."""

    sizes: list[int]

    def dummy_run(self, size: int) -> None:
        """Once."""

    def seconds(self, size: int) -> float:
        """What one takes."""


def choose_tiles(cycles: Cycles, tiles: Tiles) -> None:
    """Choose for every product that has no choice yet, and keep the choices for later starts."""
    told = False
    for size in cycles.sizes:
        while unchosen := _unchosen(cycles, size, tiles):  # a chain taken apart asks for more
            if not told:
                message = "measuring this GPU, once for a model: it may take minutes"
                warnings.warn(message, stacklevel=2)
                told = True
            _choose_all(cycles, size, unchosen, tiles)
        if not tiles.asked:  # rows are too many for tiles, and more in the sizes that follow
            break
    if told:
        _keep(tiles)


def _unchosen(cycles: Cycles, size: int, tiles: Tiles) -> list[Asked]:
    """A cycle's products and chains without a choice, the heaviest first."""
    tiles.asked.clear()
    cycles.dummy_run(size)
    weights = {
        asked: count * asked.weights
        for asked, count in tiles.asked.items()
        if not (isinstance(asked, Chain) and tiles.get(asked) is APART)
    }
    enough = LEAST_SHARE * sum(weights.values())
    heavy = [asked for asked in weights if weights[asked] >= enough and asked not in tiles]
    return sorted(heavy, key=lambda asked: -weights[asked])


def _choose_all(cycles: Cycles, size: int, unchosen: list[Asked], tiles: Tiles) -> None:
    """One after another, each beside the choices before it."""
    for asked in unchosen:
        best, *others = candidates(asked)
        least = _seconds_with(asked, best, cycles, size, tiles)
        for choice in others:
            found = _seconds_with(asked, choice, cycles, size, tiles)
            if found < least * FASTER:
                best, least = choice, found
        tiles.set(asked, best)


def _seconds_with(asked: Asked, choice: Choice, cycles: Cycles, size: int, tiles: Tiles) -> float:
    """What a cycle takes with a choice, for which there may be no room; it is taken back."""
    before = tiles.get(asked)
    tiles.set(asked, choice)
    try:
        return cycles.seconds(size)
    except (OutOfResources, PTXASError, torch.OutOfMemoryError):
        return float("inf")
    finally:
        tiles.set(asked, before)


def _keep(tiles: Tiles) -> None:
    try:
        tiles.save()
    except OSError as error:
        warnings.warn(f"the next start will measure again: {error}", stacklevel=3)

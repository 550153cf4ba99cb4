"""Tiles and rings for small batches, chosen by the time of whole cycles at the first start."""

import warnings
from typing import Protocol

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from peagle.ops.triton.tiles import APART, Asked, Chain, Choice, Tiles, candidates

LEAST_SHARE = 0.05
"""Share of a cycle's weights below which a product is not measured at a batch size. If it has no
larger one at any size, it keeps what was best on an H200."""
FASTER = 0.997
"""Share of the time so far that a better choice must stay below: more than noise."""


class Cycles(Protocol):
    """Cycles of several batch sizes that work for no request."""

    sizes: list[int]

    def dummy_run(self, size: int) -> None:
        """Run a cycle once."""

    def seconds(self, size: int) -> float:
        """Seconds of a captured cycle."""


def choose_tiles(cycles: Cycles, tiles: Tiles) -> None:
    """Choose for every product that has no choice yet, and keep the choices for later starts."""
    warned = False
    for size in cycles.sizes:
        while unchosen := _unchosen(
            cycles, size, tiles
        ):  # a chain that is taken apart adds products
            if not warned:
                message = "measuring this GPU, once for a model: it may take minutes"
                warnings.warn(message, stacklevel=2)
                warned = True
            _choose_all(cycles, size, unchosen, tiles)
        if not tiles.asked:  # too many rows for tiles, and more in the sizes that follow
            break
    if warned:
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
    """Choose for one after another, each with the choices made before it."""
    for asked in unchosen:
        best, *others = candidates(asked)
        least = _seconds_with(asked, best, cycles, size, tiles)
        for choice in others:
            found = _seconds_with(asked, choice, cycles, size, tiles)
            if found < least * FASTER:
                best, least = choice, found
        tiles.set(asked, best)


def _seconds_with(asked: Asked, choice: Choice, cycles: Cycles, size: int, tiles: Tiles) -> float:
    """Time of a cycle with a choice, infinite if there is no room for it."""
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

"""Tiles for small batches, chosen by the time of whole cycles at the first start on a GPU."""

import warnings
from typing import Protocol

import torch
from triton.runtime.errors import OutOfResources, PTXASError

from peagle.ops.triton.tiles import Choice, Product, Tiles, candidates

LEAST_SHARE = 0.05
"""Of a cycle's weights: products with less are left to a size in which they have more, and without
one keep what was best on an H200."""
FASTER = 0.997
"""What noise does not do."""


class Cycles(Protocol):
    """Cycles of several sizes, run for nobody."""

    sizes: list[int]

    def run_for_nobody(self, size: int) -> None:
        """Once."""

    def seconds(self, size: int) -> float:
        """What one takes."""


def choose_tiles(cycles: Cycles, tiles: Tiles) -> None:
    """Choose for every product that has no choice yet, and keep the choices for later starts."""
    told = False
    for size in cycles.sizes:
        products = _unchosen(cycles, size, tiles)
        if not tiles.asked:  # rows are too many for tiles, and more in the sizes that follow
            break
        if products and not told:
            warnings.warn("measuring this GPU, once for a model: it may take minutes", stacklevel=2)
            told = True
        _choose_all(cycles, size, products, tiles)
    if told:
        _keep(tiles)


def _unchosen(cycles: Cycles, size: int, tiles: Tiles) -> list[Product]:
    """A cycle's products without a choice, the heaviest first."""
    tiles.asked.clear()
    cycles.run_for_nobody(size)
    weights = {product: count * product.weights for product, count in tiles.asked.items()}
    enough = LEAST_SHARE * sum(weights.values())
    heavy = [p for p in weights if weights[p] >= enough and p not in tiles]
    return sorted(heavy, key=lambda product: -weights[product])


def _choose_all(cycles: Cycles, size: int, products: list[Product], tiles: Tiles) -> None:
    """One after another, each beside the choices before it."""
    for product in products:
        best, *others = candidates(product)
        least = _seconds_with(product, best, cycles, size, tiles)
        for tile in others:
            found = _seconds_with(product, tile, cycles, size, tiles)
            if found < least * FASTER:
                best, least = tile, found
        tiles.set(product, best)


def _seconds_with(product: Product, tile: Choice, cycles: Cycles, size: int, tiles: Tiles) -> float:
    """What a cycle takes with a choice, for which there may be no room; it is taken back."""
    before = tiles.get(product)
    tiles.set(product, tile)
    try:
        return cycles.seconds(size)
    except (OutOfResources, PTXASError, torch.OutOfMemoryError):
        return float("inf")
    finally:
        tiles.set(product, before)


def _keep(tiles: Tiles) -> None:
    try:
        tiles.save()
    except OSError as error:
        warnings.warn(f"the next start will measure again: {error}", stacklevel=3)

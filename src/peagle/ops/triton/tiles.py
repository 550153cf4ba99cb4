"""How products of few rows read their weights: the tiles that were fastest on an H200.

To measure at the first start took 50 to 100 s, and the tiles that it chose were no faster: in whole
cycles these tiles were as fast, or up to 3 % faster.
"""

import math
from dataclasses import dataclass, replace

import triton
from torch import Tensor

from peagle.ops.triton.launch import shared_memory


@dataclass(frozen=True)
class Tile:
    """How one program reads a weight: for so many outputs, so many of their inputs in a step."""

    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    """Programs that share a tile, each with a part of the depth."""
    overlaps: bool = False
    """Whether the launch overlaps (`launch.overlap`): not where its programs would crowd on some
    multiprocessors."""


FEW_OUTPUTS = {
    16: Tile(16, 256, 2, 5, splits=8, overlaps=True),
    32: Tile(16, 256, 2, 5, splits=8, overlaps=True),
    64: Tile(16, 128, 2, 5, splits=8, overlaps=True),
}
"""Tiles of a recurrence's gates, say: else one program would read all of a line's depth."""
NARROW = {
    16: Tile(16, 256, 2, 5, overlaps=True),
    32: Tile(16, 256, 2, 5, overlaps=True),
    64: Tile(64, 128, 4, 4, splits=2, overlaps=True),
}
"""Tiles of narrow products, by padded rows."""
MEDIUM = {
    16: Tile(32, 128, 4, 5, overlaps=True),
    32: Tile(16, 256, 2, 4, overlaps=True),
    64: Tile(64, 128, 4, 4, overlaps=True),
}
WIDE = {16: Tile(64, 128, 4, 3), 32: Tile(64, 128, 4, 3), 64: Tile(64, 128, 4, 4)}
GATES = {16: Tile(32, 128, 4, 3), 32: Tile(64, 128, 4, 3), 64: Tile(64, 64, 4, 4)}
"""Tiles of gates. None overlaps, so that each is a fence: all that was launched before a gate is
settled for the next attention (`attend_product`)."""
BY_OUTPUTS = ((257, FEW_OUTPUTS), (4097, NARROW), (16384, MEDIUM), (math.inf, WIDE))
"""Tiles of products with fewer outputs than the number beside them; a narrow product has two
programs on each multiprocessor."""


def padded(rows: int) -> int:
    """Rows of a product's tile."""
    return max(16, triton.next_power_of_2(rows))


def tile_of(x: Tensor, outputs: int, gated: bool) -> Tile:
    """The tile for x [rows, depth] times a weight, with no more stages and depth than fit into
    shared memory."""
    tiles = GATES if gated else next(tiles for fewer, tiles in BY_OUTPUTS if outputs < fewer)
    tile = tiles[padded(len(x))]
    line = (padded(len(x)) + tile.columns * (1 + gated)) * x.element_size()
    while line * tile.depth * tile.stages > shared_memory(x):
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, depth=tile.depth // 2)
    return tile

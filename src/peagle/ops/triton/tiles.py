"""How products of few rows read their weights, alone or in a chain: the fastest on this GPU."""

import functools
import json
import math
import os
from collections import Counter
from dataclasses import astuple, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from peagle.files import replacing
from peagle.ops.products.product import Epilogue, Product
from peagle.ops.triton.launch import shared_memory

MOST_ROWS = 64
"""With more rows, cuBLAS multiplies."""
SHALLOWEST = 16
"""The depth of a product must be a multiple of this."""


@dataclass(frozen=True)
class Tile:
    """How one program reads: output columns, weight columns per step, warps, stages."""

    columns: int
    depth: int
    warps: int
    stages: int
    splits: int = 1
    """Programs that share a tile, each with a part of the depth."""
    overlaps: bool = False
    """Whether `launch.overlap` is used: not where programs would crowd on some processors."""


@dataclass(frozen=True)
class Chain:
    """The products between two layers' attentions, which `layer_chain` has in one launch."""

    rows: int
    """8, 16, 32 or 64."""
    hidden: int
    heads: int
    """Columns of attended values."""
    inner: int

    @property
    def weights(self) -> int:
        """Numbers of the weights, without the next layer's q, k, v: the last layer has none."""
        return self.hidden * (self.heads + 3 * self.inner)


@dataclass(frozen=True)
class Ring:
    """How far ahead a chain requests weights."""

    room: int
    """KiB of shared memory."""


CuBLAS = None
"""In place of a tile."""
APART = None
"""In place of a ring: a launch for each product."""
Asked = Product | Chain
Choice = Tile | Ring | None

NARROW = (
    Tile(16, 256, 2, 5, overlaps=True),
    Tile(16, 128, 2, 5, overlaps=True),
    Tile(32, 256, 4, 5, overlaps=True),
    Tile(64, 128, 4, 4, splits=2, overlaps=True),
)
"""For a few thousand outputs: two programs on each multiprocessor."""
MEDIUM = (
    Tile(32, 128, 4, 5, overlaps=True),
    Tile(16, 256, 2, 4, overlaps=True),
    Tile(32, 256, 4, 3, overlaps=True),
    Tile(64, 128, 4, 4, overlaps=True),
)
WIDE = (Tile(64, 128, 4, 3), Tile(64, 64, 4, 4), Tile(32, 128, 4, 4), Tile(64, 128, 4, 4))
"""For tens of thousands of outputs."""
GATES = (Tile(32, 128, 4, 3), Tile(32, 128, 2, 3), Tile(64, 128, 4, 3), Tile(64, 64, 4, 4))
"""None overlaps: after a gate everything is settled (`attend_product`)."""
MEDIUM_OUTPUTS, WIDE_OUTPUTS = 4097, 16384
"""Fewest outputs for `MEDIUM` and for `WIDE`."""
BEST = {16: (0, 0, 0, 0), 32: (0, 1, 0, 2), 64: (3, 3, 3, 3)}
"""By padded rows, the index of the best on an H200 in each of the lists above."""
RINGS = (Ring(208), Ring(144), APART)
"""The largest, and one that leaves room for a program of a Triton kernel."""


class Tiles:
    """The choices for one GPU, and the file that keeps them from one start to the next."""

    def __init__(self, file: Path | None = None) -> None:
        """Raises nothing: a file that cannot be read counts as none."""
        self._file = file
        self._chosen = {} if file is None else _read(file)
        self.asked: Counter[Asked] = Counter()
        """How often `takes` was asked for each since it was last cleared."""

    def __contains__(self, asked: Asked) -> bool:
        """Whether a choice was made."""
        return asked in self._chosen

    def get(self, asked: Asked) -> Choice:
        """The choice, or what was best on an H200 for this kind."""
        return self._chosen.get(asked, candidates(asked)[0])

    def set(self, asked: Asked, choice: Choice) -> None:
        """Choose."""
        self._chosen[asked] = choice

    def save(self) -> None:
        """Write the choices, merged with those that another process wrote. Raises `OSError`."""
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        kept = _read(self._file) | self._chosen
        listed = [[astuple(asked), choice and astuple(choice)] for asked, choice in kept.items()]
        with replacing(self._file, f".{os.getpid()}") as scratch:
            scratch.write_text(json.dumps(listed) + "\n")


@functools.cache
def candidates(asked: Asked) -> tuple[Choice, ...]:
    """What may be fastest, the best on an H200 first."""
    return RINGS if isinstance(asked, Chain) else _tiles(asked)


def _tiles(product: Product) -> tuple[Choice, ...]:
    kind = 3 if product.gated else _kind(product.outputs)
    tiles = (NARROW, MEDIUM, WIDE, GATES)[kind]
    best = tiles[BEST[product.rows][kind]]
    return (best, *(tile for tile in tiles if tile != best), CuBLAS)


def _kind(outputs: int) -> int:
    return (outputs >= MEDIUM_OUTPUTS) + (outputs >= WIDE_OUTPUTS)


def padded(rows: int) -> int:
    """Rows of a product's tile."""
    return max(16, triton.next_power_of_2(rows))


def takes(product: Product, device: torch.device) -> bool:
    """Whether a tile beats cuBLAS for a product. Counts what it is asked for."""
    if product.rows > MOST_ROWS or product.depth % SHALLOWEST:
        return False
    tiles, key = tiles_of(device), _key(product)
    tiles.asked[key] += 1
    return tiles.get(key) is not CuBLAS


def tile_of(x: Tensor, outputs: int, epilogue: Epilogue) -> Tile:
    """The tile for x [rows, depth] times a weight, reduced to what fits into shared memory."""
    rows, depth = x.shape
    product = Product(rows, outputs, depth, str(x.dtype).removeprefix("torch."), epilogue)
    tile = tiles_of(x.device).get(_key(product))
    assert isinstance(tile, Tile)
    return fitting(tile, x, product.gated)


def _key(product: Product) -> Product:
    """What is measured once for all numbers of rows that are padded alike."""
    return replace(product, rows=padded(product.rows))


def fitting(tile: Tile, x: Tensor, gated: bool) -> Tile:
    """The same with no more stages and depth than fit into shared memory."""
    rows, depth = x.shape
    step = math.gcd(depth, tile.depth)
    splits = tile.splits if depth % (step * tile.splits) == 0 else 1
    tile = replace(tile, depth=step, splits=splits)
    line = (padded(rows) + tile.columns * (1 + gated)) * x.element_size()
    while line * tile.depth * tile.stages > shared_memory(x):
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, depth=tile.depth // 2)
    return tile


@functools.cache
def tiles_of(device: torch.device) -> Tiles:
    """The choices for a device; without a file under the interpreter or without a home."""
    if device.type != "cuda":
        return Tiles()
    gpu = torch.cuda.get_device_name(device).replace(" ", "-")
    made_by = f"triton-{triton.__version__}-torch-{torch.__version__}-peagle-{version('peagle')}"
    try:
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        return Tiles()
    return Tiles(Path(home) / "peagle" / f"tiles-{gpu}-{made_by}.json")


def _read(file: Path) -> dict[Asked, Choice]:
    """The choices of a file that are still among the candidates; none where it cannot be read."""
    try:
        pairs = [_pair(asked, choice) for asked, choice in json.loads(file.read_text())]
        return {asked: choice for asked, choice in pairs if choice in candidates(asked)}
    except (OSError, ValueError, TypeError, LookupError):
        return {}


def _pair(asked: list[Any], choice: list[Any] | None) -> tuple[Asked, Choice]:
    """As `Tiles.save` lists them: a product's epilogue tells it from a chain."""
    if isinstance(asked[-1], str):
        rows, outputs, depth, kind, epilogue = asked
        product = Product(rows, outputs, depth, kind, Epilogue(epilogue))
        return product, None if choice is None else Tile(*choice)
    return Chain(*asked), None if choice is None else Ring(*choice)

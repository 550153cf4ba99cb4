"""How products of few rows are cut into tiles."""

import pytest
import torch

from peagle.ops.linear import Linear
from peagle.ops.products.few_rows import FewRows
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue


def test_behind_a_gate_everything_is_settled() -> None:
    from peagle.ops.triton.tiles import GATES

    assert not any(tile.overlaps for tile in GATES.values())


@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("outputs", [96, 4096, 6144, 32000])
@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_is_cut_down_to_the_memory_there_is(rows: int, outputs: int, gated: bool) -> None:
    from peagle.ops.triton.launch import H200_SHARED_MEMORY
    from peagle.ops.triton.tiles import padded, tile_of

    x = torch.zeros(rows, 2880)
    fit = tile_of(x, outputs, gated)
    lines = padded(rows) + fit.columns * (1 + gated)
    assert lines * fit.depth * fit.stages * x.element_size() <= H200_SHARED_MEMORY


def test_wide_products_have_wide_tiles() -> None:
    from peagle.ops.triton.tiles import tile_of

    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    assert tile_of(x, 4096, False).columns < tile_of(x, 6144, False).columns
    assert tile_of(x, 6144, False).columns < tile_of(x, 32000, False).columns


def test_too_many_rows_and_odd_depths_are_left_to_cublas() -> None:
    def takes(rows: int, depth: int) -> bool:
        given = Normed(torch.zeros(rows, depth), None, 0.0)
        return FewRows().takes(given, Linear(depth, 48), Epilogue.NONE)

    assert takes(64, 32)
    assert not takes(65, 32)
    assert not takes(1, 24)

"""How products of few rows are cut into tiles."""

import pytest
import torch

from peagle.ops.products.product import Product


def test_behind_a_gate_everything_is_settled() -> None:
    from peagle.ops.triton.tiles import GATES

    assert not any(tile.overlaps for tile in GATES.values())


@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("depth", [4096, 2880, 48])
@pytest.mark.parametrize("outputs", [4096, 6144, 32000])
@pytest.mark.parametrize("gated", [False, True])
def test_a_tile_is_cut_down_to_the_memory_there_is(
    rows: int, depth: int, outputs: int, gated: bool
) -> None:
    from peagle.ops.triton.launch import H200_SHARED_MEMORY
    from peagle.ops.triton.tiles import padded, tile_of

    x = torch.zeros(rows, depth)
    fit = tile_of(x, outputs, gated)
    lines = padded(rows) + fit.columns * (1 + gated)
    assert lines * fit.depth * fit.stages * x.element_size() <= H200_SHARED_MEMORY


def test_wide_products_have_wide_tiles() -> None:
    from peagle.ops.triton.tiles import tile_of

    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    assert tile_of(x, 4096, False).columns < tile_of(x, 6144, False).columns
    assert tile_of(x, 6144, False).columns < tile_of(x, 32000, False).columns


def test_too_many_rows_and_odd_depths_are_left_to_cublas() -> None:
    from peagle.ops.triton.tiles import takes

    assert takes(Product(64, 48, 32, "float32"))
    assert not takes(Product(65, 48, 32, "float32"))
    assert not takes(Product(1, 48, 24, "float32"))

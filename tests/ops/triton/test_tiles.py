import os
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

BF16 = "bfloat16"
PRODUCTS = [
    (rows, outputs, 4096, gated, BF16)
    for rows in (16, 32, 64)
    for outputs in (4096, 6144, 32000)
    for gated in (False, True)
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_has_several_tiles_and_cublas_to_choose_from(product: tuple) -> None:
    from peagle.ops.triton.tiles import CuBLAS, Product, candidates

    found = candidates(Product(*product))
    assert len(found) == len(set(found)) >= 4
    assert found[0] is not CuBLAS
    assert found[-1] is CuBLAS


def test_behind_a_gate_everything_is_settled() -> None:
    from peagle.ops.triton.tiles import GATES

    assert not any(tile.overlaps for tile in GATES)


@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("depth", [4096, 2880, 48])
def test_a_tile_is_cut_down_to_the_memory_there_is(rows: int, depth: int) -> None:
    from peagle.ops.triton.launch import H200_SHARED_MEMORY
    from peagle.ops.triton.tiles import GATES, NARROW, fitting, padded

    x = torch.zeros(rows, depth)
    for gated, tiles in ((False, NARROW), (True, GATES)):
        for tile in tiles:
            fit = fitting(tile, x, gated)
            lines = padded(rows) + fit.columns * (1 + gated)
            assert lines * fit.depth * fit.stages * x.element_size() <= H200_SHARED_MEMORY
            assert depth % (fit.depth * fit.splits) == 0


def test_too_many_rows_and_odd_depths_are_left_to_cublas() -> None:
    from peagle.ops.triton.tiles import takes

    assert takes(torch.zeros(64, 32), 48)
    assert not takes(torch.zeros(65, 32), 48)
    assert not takes(torch.zeros(1, 24), 48)


def test_products_that_are_asked_for_are_counted() -> None:
    from peagle.ops.triton.tiles import Product, takes, tiles_of

    x = torch.zeros(3, 32)
    tiles_of(x.device).asked.clear()
    takes(x, 48)
    takes(x[:1], 48)
    takes(x.bfloat16(), 96, gated=True)
    found = tiles_of(x.device).asked
    assert found == {
        Product(16, 48, 32, False, "float32"): 2,
        Product(16, 96, 32, True, BF16): 1,
    }


def test_choices_are_kept_in_a_file(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import CuBLAS, Product, Tile, Tiles

    file = tmp_path / "deep" / "tiles.json"
    one, other = Product(16, 4096, 4096, False, BF16), Product(64, 12288, 4096, True, BF16)
    tiles = Tiles(file)
    tiles.set(one, Tile(16, 128, 2, 5, overlaps=True))
    tiles.set(other, CuBLAS)
    tiles.save()
    again = Tiles(file)
    assert astuple(again.get(one)) == (16, 128, 2, 5, 1, True)
    assert other in again
    assert again.get(other) is CuBLAS
    assert os.listdir(file.parent) == [file.name]


def test_two_starts_keep_both_their_choices(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import CuBLAS, Product, Tiles

    starts = [Tiles(tmp_path / "tiles.json") for _ in range(2)]
    products = [Product(16, outputs, 4096, False, BF16) for outputs in (4096, 6144)]
    for start, product in zip(starts, products, strict=True):
        start.set(product, CuBLAS)
        start.save()
    kept = Tiles(tmp_path / "tiles.json")
    assert all(product in kept for product in products)


def test_a_kept_tile_that_is_no_candidate_is_measured_again(tmp_path: Path) -> None:
    """What a gate's kernel cannot do, or would not be settled behind, is not believed."""
    from peagle.ops.triton.tiles import Product, Tile, Tiles

    gate = Product(16, 12288, 4096, True, BF16)
    for tile in (Tile(64, 128, 4, 4, splits=2), Tile(32, 128, 4, 3, overlaps=True)):
        tiles = Tiles(tmp_path / "tiles.json")
        tiles.set(gate, tile)
        tiles.save()
        assert gate not in Tiles(tmp_path / "tiles.json")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", '[[["a"], [1]]]', "[[[[],1,1,false,1],0]]", "[[[1,1,1,false,1],[]]]", "\x00"],
)
def test_a_file_that_is_none_of_ours_is_as_none(tmp_path: Path, text: str) -> None:
    from peagle.ops.triton.tiles import Product, Tiles

    file = tmp_path / "tiles.json"
    file.write_text(text)
    assert Product(16, 4096, 4096, False, BF16) not in Tiles(file)

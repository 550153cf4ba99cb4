import os
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from peagle.ops.products.product import Epilogue, Product

BF16 = "bfloat16"
PRODUCTS = [
    Product(rows, outputs, 4096, BF16, epilogue)
    for rows in (16, 32, 64)
    for outputs in (4096, 6144, 32000)
    for epilogue in Epilogue
]


@pytest.mark.parametrize("product", PRODUCTS)
def test_every_product_has_several_tiles_and_cublas_to_choose_from(product: Product) -> None:
    from peagle.ops.triton.tiles import CuBLAS, candidates

    found = candidates(product)
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

    device = torch.device("cpu")
    assert takes(Product(64, 48, 32, "float32"), device)
    assert not takes(Product(65, 48, 32, "float32"), device)
    assert not takes(Product(1, 48, 24, "float32"), device)


def test_products_that_are_asked_for_are_counted() -> None:
    from peagle.ops.triton.tiles import takes, tiles_of

    device = torch.device("cpu")
    tiles_of(device).asked.clear()
    takes(Product(3, 48, 32, "float32"), device)
    takes(Product(1, 48, 32, "float32"), device)
    takes(Product(3, 96, 32, BF16, Epilogue.GATE), device)
    assert tiles_of(device).asked == {
        Product(16, 48, 32, "float32"): 2,
        Product(16, 96, 32, BF16, Epilogue.GATE): 1,
    }


def test_choices_are_kept_in_a_file(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import CuBLAS, Tile, Tiles

    file = tmp_path / "deep" / "tiles.json"
    one, other = Product(16, 4096, 4096, BF16), Product(64, 12288, 4096, BF16, Epilogue.GATE)
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
    from peagle.ops.triton.tiles import CuBLAS, Tiles

    starts = [Tiles(tmp_path / "tiles.json") for _ in range(2)]
    products = [Product(16, outputs, 4096, BF16) for outputs in (4096, 6144)]
    for start, product in zip(starts, products, strict=True):
        start.set(product, CuBLAS)
        start.save()
    kept = Tiles(tmp_path / "tiles.json")
    assert all(product in kept for product in products)


def test_a_kept_tile_that_is_no_candidate_is_measured_again(tmp_path: Path) -> None:
    """What a gate's kernel cannot do, or would not be settled behind, is not believed."""
    from peagle.ops.triton.tiles import Tile, Tiles

    gate = Product(16, 12288, 4096, BF16, Epilogue.GATE)
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
    from peagle.ops.triton.tiles import Tiles

    file = tmp_path / "tiles.json"
    file.write_text(text)
    assert Product(16, 4096, 4096, BF16) not in Tiles(file)

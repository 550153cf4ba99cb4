from pathlib import Path

import pytest

from peagle.ops.products.product import Epilogue, Product

QKV, DOWN, SMALL = (6144, 4096), (4096, 12288), (16, 16)
BF16 = "bfloat16"


class Cycles:
    """Two sizes of cycles whose time is given by the tiles of their products."""

    sizes = [1, 4]

    def __init__(self, tiles, best: dict, broken: object = None) -> None:  # type: ignore[no-untyped-def]
        self._tiles, self._best, self._broken = tiles, best, broken
        self.measured = 0

    def _products(self, size: int):  # type: ignore[no-untyped-def]
        return [Product(16 if size == 1 else 32, *shape, BF16) for shape in (SMALL, QKV, DOWN)]

    def dummy_run(self, size: int) -> None:
        self._tiles.asked.update(self._products(size))

    def seconds(self, size: int) -> float:
        from triton.runtime.errors import OutOfResources

        self.measured += 1
        chosen = {product: self._tiles.get(product) for product in self._products(size)}
        if self._broken and self._broken in chosen.values():
            raise OutOfResources(2, 1, "shared memory")
        right = sum(chosen[p] == tile for p, tile in self._best.items() if p in chosen)
        return 1.0 - 0.1 * right


def best_of():  # type: ignore[no-untyped-def]
    from peagle.ops.triton.tiles import CuBLAS, candidates

    one, other = Product(16, *QKV, BF16), Product(32, *DOWN, BF16)
    return {one: candidates(one)[2], other: CuBLAS}


@pytest.mark.filterwarnings("ignore:measuring")
def test_the_quickest_is_chosen_for_heavy_products_alone(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import Tiles, candidates
    from peagle.ops.triton.tuning import choose_tiles

    tiles, best = Tiles(tmp_path / "tiles.json"), best_of()
    choose_tiles(Cycles(tiles, best), tiles)
    for product, tile in best.items():
        assert tiles.get(product) == tile
    as_good = Product(16, *DOWN, BF16)
    assert as_good in tiles
    assert tiles.get(as_good) == candidates(as_good)[0]
    assert Product(16, *SMALL, BF16) not in tiles


def test_a_second_start_measures_nothing(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import Tiles
    from peagle.ops.triton.tuning import choose_tiles

    first = Tiles(tmp_path / "tiles.json")
    with pytest.warns(UserWarning, match="measuring this GPU"):
        choose_tiles(Cycles(first, best_of()), first)
    again = Tiles(tmp_path / "tiles.json")
    cycles = Cycles(again, best_of())
    choose_tiles(cycles, again)
    assert not cycles.measured


def test_a_tile_that_does_not_fit_is_not_chosen_and_a_full_disk_is_told(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import Tiles
    from peagle.ops.triton.tuning import choose_tiles

    (tmp_path / "file").touch()
    tiles, best = Tiles(tmp_path / "file" / "tiles.json"), best_of()
    (product, tile), *_ = best.items()
    with pytest.warns(UserWarning, match="measur") as told:
        choose_tiles(Cycles(tiles, best, broken=tile), tiles)
    assert tiles.get(product) != tile
    assert [str(w.message).split(",")[0].split(":")[0] for w in told] == [
        "measuring this GPU",
        "the next start will measure again",
    ]


@pytest.mark.filterwarnings("ignore:measuring")
def test_sizes_whose_rows_are_all_left_to_cublas_are_not_run(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import Tiles
    from peagle.ops.triton.tuning import choose_tiles

    class Many(Cycles):
        sizes = [1, 4, 64, 128, 256]

        def dummy_run(self, size: int) -> None:
            run.append(size)
            if size < 64:
                super().dummy_run(size)

    run: list[int] = []
    tiles = Tiles(tmp_path / "tiles.json")
    choose_tiles(Many(tiles, best_of()), tiles)
    assert list(dict.fromkeys(run)) == [1, 4, 64]


@pytest.mark.filterwarnings("ignore:measuring")
def test_what_a_chain_taken_apart_asks_for_is_chosen_too(tmp_path: Path) -> None:
    from peagle.ops.triton.tiles import APART, Chain, Tiles, candidates
    from peagle.ops.triton.tuning import choose_tiles

    chain = Chain(rows=8, hidden=4096, heads=4096, inner=12288)
    inside = [Product(16, *shape, BF16) for shape in (QKV, DOWN, (4096, 4096))]
    inside.append(Product(16, 12288, 4096, BF16, Epilogue.GATE))

    class Chained(Cycles):
        sizes = [1]

        def _products(self, size: int):  # type: ignore[no-untyped-def]
            return [chain] if self._tiles.get(chain) is not APART else [chain, *inside]

    best = {chain: APART} | {product: candidates(product)[1] for product in inside}
    tiles = Tiles(tmp_path / "tiles.json")
    choose_tiles(Chained(tiles, best), tiles)
    again = Tiles(tmp_path / "tiles.json")
    for asked, choice in best.items():
        assert asked in again
        assert again.get(asked) == choice

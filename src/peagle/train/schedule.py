"""Which rows and chains each step takes: all of a run's randomness, from its recipe alone."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from peagle.train.cod import Chains, depth_shares, sample_chains
from peagle.train.packing import PackedRows
from peagle.train.recipe import Recipe


class Schedule:
    """The steps of a run over packed rows; each step is drawn independently of the others."""

    def __init__(self, recipe: Recipe, rows: PackedRows) -> None:
        self._recipe, self._rows = recipe, rows
        self._order = lru_cache(maxsize=2)(self._draw_order)

    @property
    def shares(self) -> list[float]:
        """Share of the anchors at each depth; P-EAGLE alone drops some."""
        recipe = self._recipe
        ratio = recipe.cod_ratio if recipe.method == "peagle" else 1.0
        return depth_shares(recipe.num_speculative_tokens, ratio, recipe.cod_floor)

    def passes(self, step: int) -> Sequence[Tensor]:
        """The step's rows, pass by pass; every epoch takes all rows in an order of its own."""
        count, wanted = len(self._rows), self._recipe.rows_per_step
        places = (divmod(place, count) for place in range(step * wanted, (step + 1) * wanted))
        rows = torch.stack([self._order(epoch)[offset] for epoch, offset in places])
        return rows.split(self._recipe.rows_per_pass)

    def chains(self, step: int) -> list[Chains]:
        """The step's chains, pass by pass: one draw for all rows, however they are divided."""
        passes, recipe = self.passes(step), self._recipe
        generator = torch.Generator().manual_seed((recipe.seed << 32) + step)
        batch = self._rows.batch(torch.cat(list(passes)))
        most = recipe.anchors * recipe.rows_per_step if recipe.method == "dflash" else None
        drawn = sample_chains(batch, self.shares, generator, most)
        sizes = [len(rows) * self._rows.length for rows in passes]
        return [Chains(lengths) for lengths in drawn.lengths.split(sizes)]

    def _draw_order(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(self._recipe.seed + epoch)
        return torch.randperm(len(self._rows), generator=generator)

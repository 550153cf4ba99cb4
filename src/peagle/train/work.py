"""The work of some passes: how many elements, and how many of them at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from peagle.train.cod import Chains
from peagle.train.packing import Batch
from peagle.train.recipe import Recipe


@dataclass(frozen=True)
class Work:
    """How much goes through the models, and how much of it at once."""

    tokens: int
    """Tokens through the target, and as depth 0 through the draft layers."""
    loss_elements: tuple[int, ...]
    """Elements in the loss, by depth."""
    deeper: int
    """Elements deeper than 0 that go through the draft layers, in the loss or not."""
    target_pairs: int
    draft_pairs: int
    """Pairs of a query and a key, in one layer; no token of a DFlash head's context is a query."""
    largest_pass: int
    """Tokens of the largest pass."""
    largest_segment: int
    """Elements deeper than 0 whose activations are kept at once."""

    @classmethod
    def of(cls, recipe: Recipe, passes: Sequence[tuple[Batch, Chains]], limit: int) -> Self:
        """Count some passes. limit: about how many deeper elements run together."""
        depths = recipe.num_speculative_tokens
        through = [_through(recipe, chains) for _, chains in passes]
        segments = [_segment(recipe, len(chains.deeper()), limit) for chains in through]
        context = [int((batch.positions + 1).sum()) for batch, _ in passes]
        deeper = [
            _deeper_pairs(batch, chains) for (batch, _), chains in zip(passes, through, strict=True)
        ]
        lengths = torch.cat([chains.lengths for _, chains in passes])
        return cls(
            tokens=len(lengths),
            loss_elements=tuple(int((lengths > depth).sum()) for depth in range(depths)),
            deeper=sum(len(chains.deeper()) for chains in through),
            target_pairs=sum(context),
            draft_pairs=sum(deeper) + sum(context) * (recipe.method != "dflash"),
            largest_pass=max(len(batch) for batch, _ in passes),
            largest_segment=max(segments),
        )


def _through(recipe: Recipe, chains: Chains) -> Chains:
    """The chains that go through the layers: EAGLE-3 and MTP unroll every token to every depth, and
    DFlash's blocks are whole."""
    if recipe.method == "dflash":
        return chains.blocks(recipe.num_speculative_tokens + 1)
    if recipe.kind.parallel_drafting:
        return chains
    return Chains(torch.full_like(chains.lengths, recipe.num_speculative_tokens))


def _segment(recipe: Recipe, deeper: int, limit: int) -> int:
    """Elements of the largest segment of a pass; unrolled depths are kept together."""
    if not recipe.kind.parallel_drafting:
        return deeper
    return -(-deeper // max(-(-deeper // limit), 1))


def _deeper_pairs(batch: Batch, chains: Chains) -> int:
    """An element sees its document up to its anchor, and its chain."""
    deeper = chains.deeper()
    return int((batch.positions[deeper.anchors] + 1 + deeper.depths).sum())

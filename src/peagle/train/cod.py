"""Conditional drop-token sampling: how many depths each anchor keeps (arXiv 2602.01469)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from peagle.train.packing import Batch


@dataclass(frozen=True)
class Chains:
    """The (anchor, depth) elements in the loss of a pass, on the CPU.

    An element is at position anchor + depth, where a drafter reads the next token (or, deeper than
    0, the mask token), and predicts the token after that one, number anchor + depth + 2. Depth 0
    also runs at the batch's other tokens, as context.
    """

    lengths: Tensor
    """[batch length] how many depths of each anchor are in the loss: 0 to K_train."""

    @classmethod
    def whole(cls, batch: Batch, depths: int) -> Self:
        """Every chain of a batch, as deep as a response goes on."""
        return cls(reaches(batch).clamp(max=depths))

    @property
    def anchors(self) -> Tensor:
        """Anchors of at least one element, ascending."""
        return self.lengths.nonzero().flatten()

    def deeper(self, anchors: slice = slice(None)) -> "Elements":
        """The elements of some anchors at depths above 0."""
        count = (self.lengths[anchors] - 1).clamp(min=0)
        ends = count.cumsum(0)
        which = torch.repeat_interleave(torch.arange(len(count)), count)
        depths = torch.arange(len(which)) - (ends - count)[which] + 1
        return Elements(which + (anchors.start or 0), depths)

    def segments(self, limit: int, step: int = 1) -> Iterator["Elements"]:
        """The deeper elements in roughly equal parts near `limit`; no chain is split.

        All parts but the last are just under a multiple of `step`, so that padding adds little.
        """
        ends = (self.lengths - 1).clamp(min=0).cumsum(0)
        total = int(ends[-1])
        parts = -(-total // limit)
        size = -(-total // (max(parts, 1) * step)) * step - min(int(self.lengths.max()), step - 1)
        bounds = [*range(max(size, 1), total, max(size, 1)), *([total] * (total > 0))]
        start = 0
        for stop in (torch.searchsorted(ends, torch.tensor(bounds)) + 1).tolist():
            part = self.deeper(slice(start, stop))
            start = stop
            if len(part):
                yield part

    def blocks(self, rows: int) -> "Chains":
        """The same anchors, each with `rows` elements deeper than 0."""
        return Chains((self.lengths > 0) * (rows + 1))

    def padded(self, length: int) -> "Chains":
        """These chains in a batch padded to `length` tokens; no element is in the padding."""
        return Chains(torch.cat((self.lengths, self.lengths.new_zeros(length - len(self.lengths)))))

    def loss_weight(self, decay: float) -> float:
        """Sum of decay**depth over all elements: the divisor of a mean loss."""
        counts = torch.bincount(self.lengths)
        ends = torch.arange(len(counts), dtype=torch.float64)
        of_chain = ends if decay == 1.0 else (1 - decay**ends) / (1 - decay)
        return float((counts * of_chain).sum())


@dataclass(frozen=True)
class Elements:
    """Elements of chains, sorted by anchor and then depth. All [elements]."""

    anchors: Tensor
    """Index of the anchor in its batch."""
    depths: Tensor

    def __len__(self) -> int:
        return self.anchors.shape[0]

    def __getitem__(self, which: slice) -> "Elements":
        return Elements(self.anchors[which], self.depths[which])

    @property
    def places(self) -> Tensor:
        """Positions at which the target predicts the token that each element has to predict.

        The element (anchor, depth) has read tokens up to anchor + depth + 1.
        """
        return self.anchors + self.depths + 1

    def padded(self, multiple: int) -> "Elements":
        """These elements, padded to a multiple of `multiple` with some that no other attends to."""
        missing = -len(self) % multiple
        anchors = torch.cat((self.anchors, self.anchors[-1:].expand(missing)))
        return Elements(anchors, torch.cat((self.depths, torch.ones(missing, dtype=torch.int64))))


def depth_shares(depths: int, ratio: float, floor: float) -> list[float]:
    """Share of the anchors that each depth keeps: ratio**depth, never below the floor."""
    return [max(ratio**depth, floor) if depth else 1.0 for depth in range(depths)]


def sample_chains(
    batch: Batch, shares: list[float], generator: torch.Generator, most: int | None = None
) -> Chains:
    """Draw how deep each anchor goes; chains stay within a document's response.

    Every anchor gets one random rank and keeps depth d when the rank is within that depth's share,
    so (a, d) always has (a, d - 1). most: the largest number of anchors; None: any.
    """
    # one rank for all depths, so that chains have no gaps:
    #
    #   rank       0  1  2  3  4  5  6  7
    #   depth 0    x  x  x  x  x  x  x  x     share 1
    #   depth 1    x  x  x  x  x  x           share r
    #   depth 2    x  x  x  x                 share r * r
    reach = reaches(batch)
    startable = (reach > 0).nonzero().flatten()
    rank = torch.randperm(len(startable), generator=generator)
    drawn = torch.zeros_like(rank)
    for share in shares:
        kept = math.ceil(len(startable) * share)
        drawn += rank < (kept if most is None else min(kept, most))
    lengths = torch.zeros_like(reach)
    lengths[startable] = torch.minimum(drawn, reach[startable])
    return Chains(lengths)


def reaches(batch: Batch) -> Tensor:
    """[length] how many depths an anchor can have: consecutive response tokens from two past it."""
    length = len(batch)
    follows = batch.positions[1:] == batch.positions[:-1] + 1
    going_on = batch.loss_mask.clone()
    going_on[:-1] &= batch.loss_mask[1:] & follows
    going_on[-1:] = False
    index = torch.arange(length)
    stops = torch.where(going_on, length, index).flip(0).cummin(0).values.flip(0)
    runs = torch.where(batch.loss_mask, stops - index + 1, 0)
    reach = torch.zeros_like(runs)
    # depth 0 predicts the token two behind its anchor, in the same document
    reach[:-2] = torch.where(follows[:-1] & follows[1:], runs[2:], 0)
    return reach

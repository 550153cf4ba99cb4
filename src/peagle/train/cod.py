"""Conditional drop-token sampling: which depths each anchor keeps (paper.md section 2.2)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.train.conversations import PADDING, PackedRows


@dataclass(frozen=True)
class Elements:
    """Rows of a drafter's training pass: (anchor, depth) pairs. All [batch, elements].

    Depth by depth, anchors ascending within each; the first `row_length` elements are depth 0, one
    an anchor. An element stands at position anchor + depth, where a drafter reads the next token
    (or the mask token), and predicts the token after that one, number anchor + depth + 2.
    """

    anchors: Tensor
    """Index of the anchor in its packed row."""
    depths: Tensor
    documents: Tensor
    """Document of the anchor; -1 where there is no element."""
    charged: Tensor
    """bool: whether the predicted token is part of a response."""


def depth_shares(depths: int, ratio: float, floor: float) -> list[float]:
    """Share of the anchors that each depth keeps: r**d, never below the floor."""
    return [max(ratio**depth, floor) if depth else 1.0 for depth in range(depths)]


def sample_elements(rows: PackedRows, shares: list[float], generator: torch.Generator) -> Elements:
    """Draw the anchors of every depth; chains are nested and stay within their document.

    Every anchor gets one random rank among its row's charged anchors and keeps depth d when the
    rank is within that depth's share, so (a, d) always has (a, d - 1). Sizes are the same for every
    batch; places left over are padding.
    """
    batch, length = rows.tokens.shape
    device = rows.tokens.device
    index = torch.arange(length, device=device).expand(batch, length)
    startable = reaches(rows, 0)
    noise = torch.rand(batch, length, generator=generator, device=device)
    rank = noise.masked_fill(~startable, 2.0).argsort(dim=1).argsort(dim=1)
    count = startable.sum(dim=1, keepdim=True)
    depths = [Elements(index, torch.zeros_like(index), _known(rows), startable)]
    for depth, share in enumerate(shares[1:], start=1):
        kept = (rank < (count * share).ceil()) & startable & reaches(rows, depth)
        depths.append(_take(rows, kept, depth, int(length * share) + 1))
    parts = ("anchors", "depths", "documents", "charged")
    return Elements(*(torch.cat([getattr(d, part) for d in depths], dim=1) for part in parts))


def _known(rows: PackedRows) -> Tensor:
    """Document of each anchor that has a next token in it, else padding."""
    return torch.where(_same_document(rows, 1), rows.documents, PADDING)


def _same_document(rows: PackedRows, ahead: int) -> Tensor:
    same = torch.zeros_like(rows.charged)
    same[:, :-ahead] = rows.documents[:, ahead:] == rows.documents[:, :-ahead]
    return same & (rows.documents != PADDING)


def reaches(rows: PackedRows, depth: int) -> Tensor:
    """Whether the token that (anchor, depth) predicts is a response token of the same document."""
    charged, ahead = torch.zeros_like(rows.charged), depth + 2
    if ahead < rows.charged.shape[1]:
        charged[:, :-ahead] = rows.charged[:, ahead:]
        charged &= _same_document(rows, ahead)
    return charged


def _take(rows: PackedRows, kept: Tensor, depth: int, size: int) -> Elements:
    """The kept anchors of each row, ascending, in `size` places."""
    length = kept.shape[1]
    size = min(size, length)
    index = torch.arange(length, device=kept.device).expand_as(kept)
    anchors = index.masked_fill(~kept, length).sort(dim=1).values[:, :size]
    real = anchors < length
    anchors = anchors.clamp(max=length - 1)
    documents = rows.documents.gather(1, anchors).masked_fill(~real, PADDING)
    return Elements(anchors, torch.full_like(anchors, depth), documents, real)

"""Drafts that may be chosen in some slots, and how those of neighbouring slots go together."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.ops.race import Race, arrivals
from peagle.ops.triton import in_kernels

RACED = 64
"""The likeliest drafts of a row among which a race is run."""


class Candidates(NamedTuple):
    """Drafts that may be chosen in some slots, in the order of the draft vocabulary."""

    scores: Tensor
    """[..., candidates] logits, in float32."""
    ids: Tensor
    """[..., candidates] draft ids."""
    tokens: Tensor
    """[..., candidates] target ids."""

    @classmethod
    def beside(cls, parts: Sequence["Candidates"]) -> "Candidates":
        """Those of consecutive slots together. parts: [requests, slots, candidates] each."""
        return cls(*(torch.cat(column, dim=1) for column in zip(*parts, strict=True)))

    def by_request(self, slots: int) -> "Candidates":
        """[requests * slots, candidates] -> [requests, slots, candidates]."""
        shape = (-1, slots, self.scores.shape[-1])
        return Candidates(*(each.view(shape) for each in self))


class Pairs(NamedTuple):
    """What is added to the score of a draft b after the draft a in the slot before it:
    <A[a] * gate, B[b]>."""

    predecessor: Tensor
    """[vocab, rank] A, by target ids."""
    successor: Tensor
    """[draft_vocab, rank] B, by draft ids."""
    gates: Tensor
    """[..., rank] of each slot."""

    def scores(self, previous: Tensor, following: Tensor) -> Tensor:
        """[..., previous, following].

        previous: [..., previous] target ids; following: [..., following] draft ids.
        """
        gated = self.predecessor[previous] * self.gates[..., None, :]
        return gated @ self.successor[following].mT


def paired_scores(found: Candidates, pairs: Pairs | None) -> Tensor:
    """[requests, slots, candidates before, candidates] scores of drafts after each candidate of the
    slot before; alike for all of these in the first slot.

    found: [requests, slots, candidates]; pairs: [requests, slots, rank], those of the first slot
    are not used; None: what came before changes nothing, [requests, slots, 1, candidates].
    """
    scores = found.scores[:, :, None]
    if pairs is None:
        return scores
    later = Pairs(pairs.predecessor, pairs.successor, pairs.gates[:, 1:])
    added = later.scores(found.tokens[:, :-1], found.ids[:, 1:]).float()
    first = scores[:, :1].expand(-1, -1, added.shape[2], -1)
    return torch.cat((first, scores[:, 1:] + added), dim=1)


@in_kernels("candidates")
def likeliest(logits: Tensor, offsets: Tensor, count: int) -> Candidates:
    """The `count` likeliest drafts of each row, fewer where the vocabulary has fewer.

    logits: [rows, draft_vocab]; offsets: [draft_vocab], from draft ids to target ids.
    """
    count = min(count, logits.shape[-1])
    ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    return Candidates(logits.gather(-1, ids).float(), ids, ids + offsets[ids])


@in_kernels("candidates")
def earliest(
    logits: Tensor, offsets: Tensor, count: int, race: Race, depth: int = 0, whole: bool = True
) -> Candidates:
    """The `count` drafts of each row that arrive first at the request's temperature, among its
    `RACED` likeliest.

    Where many tokens are likely, the one that is drawn is often not among the `count` likeliest.
    Where top-k or min-p leave fewer, the likeliest others are behind them.

    logits, offsets: as of `likeliest`, with as many rows for each of the race's requests; depth:
    that of a request's first row. Rows of greedy requests get the likeliest drafts; unless `whole`,
    only the first of these need be right.
    """
    count = min(count, logits.shape[-1])
    slots = len(logits) // len(race.requests)
    found = likeliest(logits, offsets, max(RACED, count)).by_request(slots)
    values = arrivals(found.scores, found.tokens, race, depth)
    likely = found.scores.sort(dim=-1, descending=True, stable=True).indices
    early = values.gather(-1, likely).sort(dim=-1, descending=True, stable=True).indices
    # behind those that take part the others, the likeliest first
    places = likely.gather(-1, early[..., :count]).sort(dim=-1).values
    return Candidates(*(each.gather(-1, places).flatten(0, 1) for each in found))

"""The likeliest drafts of some slots, and how those of neighbouring slots go together."""

from dataclasses import dataclass

from torch import Tensor

from peagle.ops.race import Race
from peagle.ops.triton import has_kernels, kernels


@dataclass(frozen=True)
class Candidates:
    """The likeliest drafts of some slots, in the order of the draft vocabulary."""

    scores: Tensor
    """[..., candidates] logits, in float32."""
    ids: Tensor
    """[..., candidates] draft ids."""
    tokens: Tensor
    """[..., candidates] target ids."""

    def by_request(self, slots: int) -> "Candidates":
        """[requests * slots, candidates] -> [requests, slots, candidates]."""
        shape = (-1, slots, self.scores.shape[-1])
        return Candidates(self.scores.view(shape), self.ids.view(shape), self.tokens.view(shape))


@dataclass(frozen=True)
class Pairs:
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


def likeliest(logits: Tensor, offsets: Tensor, count: int, race: Race | None = None) -> Candidates:
    """The `count` likeliest drafts of each row, fewer where the vocabulary has fewer.

    logits: [rows, draft_vocab]; offsets: [draft_vocab], from draft ids to target ids. With a race,
    whose requests have as many rows each, the rows of greedy requests may get the likeliest draft
    alone, in the first place.
    """
    count = min(count, logits.shape[-1])
    if has_kernels(logits):
        found = kernels("candidates").likeliest(logits, offsets, count, race)
        return Candidates(*found)
    ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    return Candidates(logits.gather(-1, ids).float(), ids, ids + offsets[ids])

"""A correction by the draft before, for slots that were computed without knowing it.

P-EAGLE's slots all run at once, so none has seen the tokens drafted in those before it. A selector
adds to the scores of a slot's candidates b, given the draft a in the slot before,

    <A[a] * (H h), B[b]>

where h is the slot's normed hidden state, and A, B hold a vector of length `rank` for each token
(DFlash2's form). That is one small product for all pairs of candidates, then a walk along them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peagle.ops.candidates import Pairs
from peagle.ops.linear import Linear


@dataclass(frozen=True)
class SelectorConfig:
    """Sizes of a selector; keys as in the correction's `config.json`."""

    rank: int
    candidates: int
    """Drafts of each slot that are scored again: the likeliest, or the earliest of a race."""


class Selector(nn.Module):
    """Scores pairs of drafts in neighbouring slots."""

    def __init__(
        self, config: SelectorConfig, hidden_size: int, vocab_size: int, draft_vocab_size: int
    ) -> None:
        super().__init__()
        self.config = config
        self.predecessor = nn.Parameter(torch.empty(vocab_size, config.rank))
        """A, by target ids: the token before may be any."""
        self.successor = nn.Parameter(torch.empty(draft_vocab_size, config.rank))
        """B, by draft ids."""
        self.projection = Linear(hidden_size, config.rank)
        """H"""

    def forward(self, gates: Tensor, previous: Tensor, following: Tensor) -> Tensor:
        """What is added to the scores: [..., previous, following].

        gates: [..., rank], of `projection`; previous: [..., previous] target ids; following:
        [..., following] draft ids.
        """
        return self.pairs(gates).scores(previous, following)

    def pairs(self, gates: Tensor) -> Pairs:
        """How drafts in some slots go with those before them. gates: [..., rank]."""
        return Pairs(self.predecessor, self.successor, gates)

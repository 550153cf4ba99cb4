"""What is proposed to follow each request's newest token: a chain of drafts, or a tree of them."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from peagle.ops.candidates import Candidates, Pairs, paired_scores
from peagle.ops.race import Race, draft_scores
from peagle.ops.triton import in_kernels

NO_DRAFT = -2
"""In place of a token where there is no draft. The target's choice is -1 where its logits are
NaN."""


class Tree(NamedTuple):
    """How the rows of a draft branch: row 0 is the newest token, row j + 1 is draft j."""

    parents: Tensor
    """[requests, drafts] row of each draft's parent."""
    depths: Tensor
    """[requests, drafts + 1] depth of each row: 0 for the root, 1 for a draft that is none."""
    ancestors: Tensor
    """[requests, drafts + 1] int32, bit j: row j is on the way from the root, or the row itself."""
    depth: int
    """Most drafts along a path."""


class Found(NamedTuple):
    """Where texts repeat themselves, and how they went on there."""

    tokens: Tensor
    """[requests, drafts] what followed; `NO_DRAFT` where nothing matches."""
    lengths: Tensor
    """[requests] how many of the last tokens stood there; 0: too few."""
    used: Tensor
    """[requests] bool: which of them are drafted."""


@dataclass(frozen=True)
class Draft:
    """The drafts of some requests, as many for each; those of a chain follow one another."""

    tokens: Tensor
    """[requests, drafts] target ids; `NO_DRAFT` where there is none."""
    tree: Tree | None = None
    """How drafts branch; None: they are a chain."""
    source: Found | None = None
    """What was found in the requests' own texts; None: nothing was looked for."""

    @property
    def depth(self) -> int:
        """Most drafts along a path."""
        return self.tokens.shape[1] if self.tree is None else self.tree.depth

    @cached_property
    def ids(self) -> Tensor:
        """[requests, drafts] what the target reads: some token where there is no draft."""
        whole = self.tree is None and self.source is None
        return self.tokens if whole else self.tokens.clamp(min=0)


@in_kernels("draft", lambda _, found, pairs=None, race=None, *rest: race is not None)
def draw(
    found: Candidates, pairs: Pairs | None = None, race: Race | None = None, depth: int = 0
) -> Tensor:
    """Drafts of consecutive slots, each chosen after the one before it: [requests, slots].

    found: [requests, slots, candidates]; pairs: [requests, slots, rank], those of the first slot
    are not used; race: the draws that the drafts are for, None for the likeliest; depth: that of
    the first slot, 0 for the first draft.
    """
    scores = paired_scores(found, pairs)
    if race is not None:
        scores = draft_scores(scores, found.tokens, race, depth)
    return found.tokens.gather(-1, _walk(scores.argmax(dim=-1)))[..., 0]


def _walk(best: Tensor) -> Tensor:
    """The candidate of each slot after that of the slot before: [requests, slots, 1].

    best: [requests, slots, previous] the candidate taken after each one of the slot before, alike
    for all in the first slot.
    """
    if best.shape[2] == 1:
        return best
    places = [best[:, 0, :1]]
    for slot in range(1, best.shape[1]):
        places.append(best[:, slot].gather(1, places[-1]))
    return torch.stack(places, dim=1)

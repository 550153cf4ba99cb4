"""Drafts chosen among candidates, and what is learnt from the target's choices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from peagle.ops.acceptance import accepted_counts
from peagle.ops.candidates import Candidates, Pairs, paired_scores
from peagle.ops.race import Race, first_arrivals
from peagle.ops.triton import has_kernels, kernels

KEPT = 1 - 1 / 2000
"""What a count keeps at each later observation: some 2,000 of them decide."""


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens, and what others might have been."""

    tokens: Tensor
    """[requests, slots] target ids; from a drafter on the host [sum(ks)], request after request."""
    alternatives: Tensor | None = None
    """[..., factors] what each of a race's factors would have given after the same drafts, -1 for
    greedy requests; None where no draws were known."""

    def kept(self, which: Tensor) -> "Drafts":
        """Some of them, flat. which: [requests, slots] bool."""
        others = None if self.alternatives is None else self.alternatives[which]
        return Drafts(self.tokens[which], others)

    def padded(self, counts: Sequence[int]) -> "Drafts":
        """Flat ones with alternatives, of which each request has so many, as [requests, slots]; -1
        where it has fewer."""
        assert self.alternatives is not None
        parts = (column.split(counts) for column in (self.tokens, self.alternatives))
        return Drafts(*(pad_sequence(part, batch_first=True, padding_value=-1) for part in parts))

    @classmethod
    def beside(cls, parts: Sequence["Drafts"]) -> "Drafts":
        """Those of consecutive slots together, all with alternatives or none."""
        others = [part.alternatives for part in parts if part.alternatives is not None]
        tokens = torch.cat([part.tokens for part in parts], dim=1)
        return cls(tokens, torch.cat(others, dim=1) if others else None)


def draw_drafts(
    found: Candidates, pairs: Pairs | None = None, race: Race | None = None, depth: int = 0
) -> Drafts:
    """Drafts of consecutive slots, each chosen after the one before it.

    found: [requests, slots, candidates]; pairs: [requests, slots, rank], those of the first slot
    are not used; race: the draws that the drafts are for, None for the likeliest; depth: that of
    the first slot, 0 for the first draft.
    """
    if race is not None and has_kernels(found.scores):
        return Drafts(*kernels("drafts").draw_drafts(found, pairs, race, depth))
    scores, slots = paired_scores(found, pairs), found.tokens.shape[1]
    if race is None:
        best = scores.argmax(dim=-1, keepdim=True)
        return Drafts(_walk(best, found.tokens, torch.zeros_like(found.ids[0, :, 0]))[..., 0])
    chosen = race.chosen[depth : depth + slots]
    others = _walk(first_arrivals(scores, found.tokens, race, depth), found.tokens, chosen)
    tokens = others.gather(-1, chosen[None, :, None].expand(len(others), -1, 1))[..., 0]
    greedy = race.sampling.temperature[race.requests] == 0
    return Drafts(tokens, others.masked_fill(greedy[:, None, None], -1))


def _walk(best: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Follow each request's drafts from slot to slot: [requests, slots, choices] target ids.

    best: [requests, slots, previous, choices] the candidate that each choice takes after each
    candidate of the slot before, alike for all in the first slot; tokens: [requests, slots,
    candidates]; chosen: [slots] the choice that is drafted.
    """
    _, slots, previous, choices = best.shape
    if previous == 1:
        return tokens.gather(-1, best[:, :, 0])
    taken = [best[:, 0, 0]]
    for slot in range(1, slots):
        last = taken[-1].index_select(1, chosen[slot - 1 : slot])
        taken.append(best[:, slot].gather(1, last[..., None].expand(-1, -1, choices))[:, 0])
    return tokens.gather(-1, torch.stack(taken, dim=1))


def record(right: Tensor, best: Tensor, drafts: Drafts, chosen: Tensor) -> None:
    """Count, in place, how often each factor was right where the target's choice is known: at every
    draft that only accepted ones come before.

    right: [depths, factors] counts, which a cycle's later observations let fade alike; best:
    [depths] the factor with the highest count; drafts: [requests, drafts], with alternatives;
    chosen: [requests, drafts + 1], what the target takes after each prefix.
    """
    if has_kernels(right):
        kernels("drafts").record(right, best, drafts.tokens, drafts.alternatives, chosen)
        return
    tokens, others = drafts.tokens, drafts.alternatives
    assert others is not None
    depths = tokens.shape[1]
    reached = torch.arange(depths, device=tokens.device) <= accepted_counts(tokens, chosen)[:, None]
    known = reached & (others[..., 0] >= 0)
    hits = (others == chosen[:, :-1, None]) & known[..., None]
    counts = right[:depths]
    counts.mul_(KEPT ** known.sum(dim=0)[:, None]).add_(hits.sum(dim=0))
    best[:depths] = counts.argmax(dim=1)

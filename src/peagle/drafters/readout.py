"""From draft layers' output to drafts: final norm, head, draft vocabulary, correction, choice.

The model, the loss and both of the engine's drafters read a drafter's output through this object.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from peagle.drafters.selector import Selector
from peagle.models.spec import DecoderSpec
from peagle.ops import residual
from peagle.ops.argmax import argmax
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race, first_arrivals

CANDIDATES = 32
"""The likeliest drafts of each slot that take part in a draw, where there is no selector."""
Product = Callable[[Linear], Tensor]
"""A layer's product with the final norm's output: [rows, out_features]."""


@dataclass(frozen=True)
class Drafts:
    """Proposed tokens, and what others might have been."""

    tokens: Tensor
    """[requests, slots] target ids; from a drafter [sum(ks)], request after request."""
    alternatives: Tensor | None = None
    """[..., factors] what each of `race.FACTORS` would have given after the same drafts; None
    where no draws were known."""

    def kept(self, which: Tensor) -> "Drafts":
        """Some of them, flat. which: [requests, slots] bool."""
        others = None if self.alternatives is None else self.alternatives[which]
        return Drafts(self.tokens[which], others)


@dataclass(frozen=True)
class Candidates:
    """The likeliest drafts of some slots."""

    scores: Tensor
    """[..., candidates] logits, highest first."""
    ids: Tensor
    """[..., candidates] draft ids."""
    tokens: Tensor
    """[..., candidates] target ids."""


class Readout(nn.Module):
    """What turns a drafter's residual stream into drafts."""

    def __init__(
        self, shape: DecoderSpec, draft_vocab_size: int, selector: Selector | None = None
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.norm.eps)
        self.head = Linear(shape.hidden_size, draft_vocab_size)
        self.selector = selector
        offsets = torch.zeros(draft_vocab_size, dtype=torch.int64, device="cpu")
        self.register_buffer("d2t", offsets, persistent=False)

    d2t: Tensor
    """[draft_vocab_size] target id = draft id + d2t[draft id]; zeros for the whole vocabulary."""

    @property
    def vocabulary(self) -> Tensor:
        """[draft_vocab_size] the target id of each draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def logits(self, hidden: Tensor) -> Tensor:
        """Residual stream [rows, hidden_size] -> logits [rows, draft_vocab_size]."""
        scores: Tensor = self.head(self.norm(hidden))
        return scores

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids in the draft vocabulary -> ids in the target's."""
        return draft_ids + self.d2t[draft_ids]

    def candidates(self, logits: Tensor, count: int) -> Candidates:
        """The likeliest drafts. logits: [..., draft_vocab_size]."""
        scores, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
        return Candidates(scores.float(), ids, self.target_ids(ids))

    def forward(self, hidden: Tensor, previous: Tensor) -> tuple[Candidates, Tensor]:
        """The likeliest drafts after known tokens, and their corrected scores.

        hidden: [rows, hidden_size]; previous: [rows] the token before each row's draft, -1 where
        the row has read it; scores: [rows, candidates] in float32. Without a selector they are
        those of the head. Gradients reach the selector and, through its gates, `hidden`.
        """
        count = CANDIDATES if self.selector is None else self.selector.config.candidates
        with torch.no_grad():
            found = self.candidates(self.logits(hidden), count)
        if self.selector is None:
            return found, found.scores
        gates = self.selector.projection(self.norm(hidden))
        added = self.selector(gates, previous.clamp(min=0)[:, None], found.ids)[:, 0]
        return found, found.scores + added.float() * (previous >= 0)[:, None]

    def draft(self, hidden: Tensor, slots: int, race: Race | None = None, depth: int = 0) -> Drafts:
        """Drafts of consecutive slots. hidden: [requests * slots, hidden_size].

        race: the draws that they are for, None for the most likely drafts; depth: that of the first
        slot. The first draft of a cycle is never corrected: its slot has read the token before.
        """
        normed = self.norm(hidden)
        return self._draft(lambda layer: layer(normed), slots, race, depth)

    def draft_normed(self, hidden: Normed, slots: int) -> Drafts:
        """The same for captured layers' output, which is normed already: the likeliest drafts."""
        return self._draft(lambda layer: residual.linear(hidden, layer), slots, None, 0)

    def _draft(self, product: Product, slots: int, race: Race | None, depth: int) -> Drafts:
        logits = product(self.head)
        if self.selector is None and race is None:
            return Drafts(argmax(logits, self.d2t).view(-1, slots))
        count = CANDIDATES if self.selector is None else self.selector.config.candidates
        found = self.candidates(logits.view(-1, slots, logits.shape[-1]), count)
        scores = found.scores[:, :, None]
        if self.selector is not None and slots > 1:
            gates = product(self.selector.projection).view(len(scores), slots, -1)
            added = self.selector(gates[:, 1:], found.tokens[:, :-1], found.ids[:, 1:]).float()
            scores = torch.cat((torch.zeros_like(added[:, :1]), added), dim=1) + scores
        if race is None:
            best = scores.argmax(dim=-1, keepdim=True)
            return Drafts(_walk(best, found.tokens, torch.zeros_like(found.ids[0, :, 0]))[..., 0])
        chosen = race.chosen[depth : depth + slots]
        best = first_arrivals(scores, found.tokens, race, depth)
        alternatives = _walk(best, found.tokens, chosen)
        index = chosen[None, :, None].expand(len(alternatives), -1, 1)
        return Drafts(alternatives.gather(-1, index)[..., 0], alternatives)


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

"""What a P-EAGLE drafter would propose at every position of texts that the target wrote.

The target's text does not depend on drafts, so everything that a way of drafting would have given
can be counted afterwards from the likeliest drafts of each slot.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.models.decoder import Decoder
from peagle.train.cod import sample_chains
from peagle.train.features import target_features
from peagle.train.packing import Document, pack
from peagle.train.partition import ParallelPass

ELEMENTS = 700
"""Deeper elements at once: on a CPU attention computes all their pairs."""


@dataclass(frozen=True)
class Slots:
    """The likeliest drafts of the K slots of every cycle that could begin in one text."""

    tokens: Tensor
    """[cycles, k, candidates] target ids, likeliest first."""
    scores: Tensor
    """[cycles, k, candidates] log-probabilities."""
    after: Tensor
    """[cycles, k, candidates, candidates] the same after each candidate of the slot before, by the
    selector; without one, and in the first slot, `scores` again and again."""
    drafts: Tensor
    """[cycles, k] what the engine drafts greedily, corrected where the drafter has a selector."""
    wanted: Tensor
    """[cycles, k] the tokens that the target wrote there."""
    newest: Tensor
    """[cycles] number of tokens known when each cycle begins."""
    text: Sequence[int]
    """Prompt and output."""


@torch.no_grad()
def slots_of(
    target: Decoder, model: DraftModel, document: Document, k: int, candidates: int
) -> Slots:
    """Run target and drafter once over a text whose last part the target wrote."""
    rows = pack([document], len(document.tokens))
    batch = rows.batch(torch.arange(1))
    features = target_features(target, batch, model.config.taps)
    chains = sample_chains(batch, [1.0] * k, torch.Generator())
    anchors = (chains.lengths == k).nonzero().flatten()
    hidden = torch.zeros(len(batch), k, model.config.transformer.hidden_size)
    for part in ParallelPass(model, batch, features, chains, ELEMENTS).passes():
        hidden[part.elements.anchors, part.elements.depths] = part.hidden
    stream, readout = hidden[anchors].flatten(0, 1), model.readout
    scores, ids = readout.logits(stream).log_softmax(dim=-1).topk(candidates, dim=-1)
    drafts = readout.draft(stream, k).tokens
    wanted = batch.tokens[anchors[:, None] + torch.arange(k) + 2]
    shape = (-1, k, candidates)
    tokens, scores = readout.vocabulary[ids].view(shape), scores.view(shape)
    after = scores[:, :, None].repeat(1, 1, candidates, 1)
    if readout.selector is not None:
        gates = readout.selector.projection(readout.norm(stream)).unflatten(0, (-1, k))
        added = readout.selector(gates[:, 1:], tokens[:, :-1], ids.view(shape)[:, 1:])
        shares = (scores[:, 1:, None] + added.float()).log_softmax(dim=-1)
        after[:, 1:] = shares + scores[:, 1:].logsumexp(dim=-1)[..., None, None]
    known = anchors + 2, document.tokens
    return Slots(tokens, scores, after, drafts, wanted, *known)


def walk(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The cycles that decoding makes: which, and the tokens that each emits.

    lengths: tokens emitted by a cycle that begins at each place.
    """
    place = 0
    while place < len(lengths):
        yield place, lengths[place]
        place += lengths[place]

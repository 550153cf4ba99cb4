"""Verification and acceptance of drafts.

Nothing is rolled back: keys after the last accepted draft are overwritten by the next pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.models.decoder import Attend, Decoder
from peagle.ops.acceptance import NO_DRAFT, accepted_counts


@dataclass(frozen=True)
class Verification:
    """The target's outputs for one batch."""

    logits: Tensor
    """[sampled rows, vocab]: the newest token's row and each draft's, request after request."""
    features: Tensor | None
    """[rows, feature_size] tapped hidden states of every row, for the next draft."""
    hidden: Tensor
    """[rows, hidden_size] of every row, which the target turns into logits."""


def verify(
    target: Decoder,
    tokens: Tensor,
    positions: Tensor,
    attend: Attend,
    sampled: Tensor | None,
    taps: tuple[int, ...],
) -> Verification:
    """One target forward over newest tokens, drafts and prompt chunks.

    tokens, positions: [rows]; sampled: the rows whose logits are wanted, None for all of them.
    """
    hidden, features = target(tokens, positions, attend, taps)
    ends = hidden if sampled is None else hidden.index_select(0, sampled)
    return Verification(target.logits(ends), features, hidden)


def accept(drafts: Tensor, chosen: Tensor, ks: Sequence[int]) -> tuple[list[list[int]], list[int]]:
    """The tokens each request emits and how many of them are its drafts.

    drafts: [sum(ks)]; chosen: [sum(k + 1)], what the target takes at each sampled row. The slots
    past a request's last emitted token are dead: the next pass writes them again (roll back).
    """
    if len(ks) == 1:
        padded_drafts, padded_chosen = drafts[None], chosen[None]
    else:
        padded_drafts = _pad(drafts, ks, max(ks), NO_DRAFT)
        padded_chosen = _pad(chosen, [k + 1 for k in ks], max(ks) + 1, -1)
    counts: list[int] = accepted_counts(padded_drafts, padded_chosen).tolist()
    tokens: list[list[int]] = padded_chosen.tolist()
    return [row[: count + 1] for row, count in zip(tokens, counts, strict=True)], counts


def _pad(flat: Tensor, sizes: Sequence[int], width: int, fill: int) -> Tensor:
    """Consecutive runs of `flat` as rows [len(sizes), width], filled up."""
    lengths = torch.tensor(sizes, device=flat.device)
    padded = flat.new_full((len(sizes), width), fill)
    padded[torch.arange(width, device=flat.device) < lengths[:, None]] = flat
    return padded

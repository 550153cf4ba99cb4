"""Which token each row takes, where the host chooses."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.logits_processor import Choice, LogitsProcessor
from peagle.engine.step import Settings
from peagle.ops.argmax import argmax
from peagle.ops.penalties import Penalties, penalize
from peagle.ops.sampling import Sampling, sample
from peagle.transfer import Download, upload

AT_ONCE = 32
"""Rows that are sampled together: each takes 60 bytes a token of the vocabulary meanwhile."""


@dataclass(frozen=True)
class SampledRows(Choice):
    """One request's rows, and what came before them."""

    tokens: Sequence[int]
    """All that are known; the first row follows the last of them."""
    prompt_length: int
    hosted: bool
    """Whether its logits are edited first."""


def choose(
    logits: Tensor,
    work: Sequence[SampledRows],
    drafts: Tensor,
    processor: LogitsProcessor,
    depths: Sequence[int] | None = None,
) -> Tensor:
    """A token for every sampled row. logits: [sum(drafts + 1), vocab]; drafts: [sum(drafts)].

    depths: how far behind a request's known tokens each row's token is, where drafts branch; None:
    0, 1, 2 ... of each request.
    """
    if any(item.hosted or item.settings.params.penalized for item in work):
        logits = logits.clone()
        processor.edit(logits, work, Download(drafts))
        _penalize(logits, work, drafts)
    if all(item.settings.params.temperature == 0 for item in work):
        return argmax(logits)
    behind = depths or [i for item in work for i in range(item.drafts + 1)]
    known = [len(item.tokens) for item in work for _ in range(item.drafts + 1)]
    places = [*map(operator.add, known, behind)]
    positions = upload(places, logits.device).split(AT_ONCE)
    each = [settings for item in work for settings in [item.settings] * (item.drafts + 1)]
    settings = sampling_of(each, logits.device).split(AT_ONCE)
    rows = logits.split(AT_ONCE)
    return torch.cat([sample(*part) for part in zip(rows, settings, positions, strict=True)])


def _penalize(logits: Tensor, work: Sequence[SampledRows], drafts: Tensor) -> None:
    """Penalize in place. logits, drafts: as in `choose`."""
    shares = logits.split([item.drafts + 1 for item in work])
    proposals = drafts.split([item.drafts for item in work])
    for item, rows, proposed in zip(work, shares, proposals, strict=True):
        if item.settings.params.penalized:
            penalties = Penalties.none(1, rows.shape[1], rows.device)
            penalties.rates[0] = torch.tensor(item.settings.params.penalties)
            known = torch.tensor(item.tokens, device=rows.device)
            penalties.begin(0, known[: item.prompt_length], known[item.prompt_length :])
            alone = torch.zeros(1, dtype=torch.int64, device=rows.device)
            penalize(rows, proposed[None], penalties, alone)


def sampling_of(settings: Sequence[Settings], device: torch.device) -> Sampling:
    """How each of some rows samples."""
    return Sampling(
        temperature=torch.tensor([s.params.temperature for s in settings], device=device),
        top_k=torch.tensor([s.top_k for s in settings], device=device),
        top_p=torch.tensor([s.params.top_p for s in settings], device=device),
        min_p=torch.tensor([s.params.min_p for s in settings], device=device),
        seeds=torch.tensor([s.seed for s in settings], device=device),
    )

"""Which token each row takes, where the host chooses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.host.rows import RequestRows
from peagle.engine.logits_processor import Choice, LogitsProcessor
from peagle.engine.step import Settings
from peagle.ops.argmax import argmax
from peagle.ops.penalties import Penalties, penalize
from peagle.ops.sampling import Sampling, sample
from peagle.transfer import Download, upload

AT_ONCE = 32
"""Rows that are sampled together: each takes 60 bytes a token of the vocabulary meanwhile."""


def choose(
    logits: Tensor,
    work: Sequence[RequestRows],
    drafts: Tensor,
    processor: LogitsProcessor,
    depths: Sequence[int] | None = None,
) -> Tensor:
    """A token for every sampled row. logits: [sum(drafts + 1), vocab]; drafts: [sum(drafts)].

    depths: how far behind a request's known tokens each row's token is, where drafts branch; None:
    0, 1, 2 ... of each request.
    """
    settings = [part.request.settings for part in work]
    if any(part.item.hosted for part in work) or any(own.params.penalized for own in settings):
        # log-probabilities are read later, and are of what the target said
        logits = logits.clone()
        choices = [Choice(part.request.settings, part.drafts, part.item.missing) for part in work]
        processor.edit(logits, choices, Download(drafts))
        _penalize(logits, work, drafts)
    if all(own.params.temperature == 0 for own in settings):
        return argmax(logits)
    owners = [part.request for part in work for _ in range(part.drafts + 1)]
    behind = depths or [place for part in work for place in range(part.drafts + 1)]
    # a token's draw is keyed by its position in the text, whatever the batch
    places = [len(own.tokens) + depth for own, depth in zip(owners, behind, strict=True)]
    of_rows = sampling_of([own.settings for own in owners], logits.device)
    columns = logits, of_rows, upload(places, logits.device)
    strips = zip(*(column.split(AT_ONCE) for column in columns), strict=True)
    return torch.cat([sample(*strip) for strip in strips])


def _penalize(logits: Tensor, work: Sequence[RequestRows], drafts: Tensor) -> None:
    """Penalize in place. logits, drafts: as in `choose`."""
    shares = logits.split([part.drafts + 1 for part in work])
    proposals = drafts.split([part.drafts for part in work])
    for part, rows, proposed in zip(work, shares, proposals, strict=True):
        request = part.request
        if request.settings.params.penalized:
            penalties = Penalties.none(1, rows.shape[1], rows.device)
            penalties.rates[0] = torch.tensor(request.settings.params.penalties)
            known = torch.tensor(request.tokens, device=rows.device)
            penalties.begin(0, known[: request.prompt_length], known[request.prompt_length :])
            alone = torch.zeros(1, dtype=torch.int64, device=rows.device)
            penalize(rows, proposed[None], penalties, alone)


def sampling_of(settings: Sequence[Settings], device: torch.device) -> Sampling:
    """How each of some rows samples."""
    columns = zip(*(own.sampling for own in settings), strict=True)
    return Sampling(*(torch.tensor(column, device=device) for column in columns))

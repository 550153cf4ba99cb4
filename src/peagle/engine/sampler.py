"""What the host has to say about tokens: which each row takes, and edited logits."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.batch import Scheduled
from peagle.engine.download import Download
from peagle.engine.request import Request
from peagle.engine.upload import upload
from peagle.ops.argmax import argmax
from peagle.ops.penalties import Penalties, penalize
from peagle.ops.sampling import Sampling, sample

AT_ONCE = 32
"""Rows that are sampled together: each takes 60 bytes a token of the vocabulary meanwhile."""


def choose(logits: Tensor, work: Sequence[Scheduled], drafts: Tensor) -> Tensor:
    """A token for every sampled row. logits: [sum(drafts + 1), vocab]; drafts: [sum(drafts)]."""
    requests = [item.request for item in work]
    if any(request.needs_host or request.params.penalized for request in requests):
        logits = logits.clone()
        edit(logits, work, Download(drafts))
        _penalize(logits, work, drafts)
    if all(request.params.temperature == 0 for request in requests):
        return argmax(logits)
    places = [item.request.total + i for item in work for i in range(item.drafts + 1)]
    positions = upload(places, logits.device).split(AT_ONCE)
    each = [request for item in work for request in [item.request] * (item.drafts + 1)]
    settings = sampling_of(each, logits.device).split(AT_ONCE)
    rows = logits.split(AT_ONCE)
    return torch.cat([sample(*part) for part in zip(rows, settings, positions, strict=True)])


def edit(logits: Tensor, work: Sequence[Scheduled], drafts: Download) -> None:
    """Apply bias, form and least length in place. logits, drafts: as in `choose`.

    Only forms wait for the drafts, and nothing waits for the logits.
    """
    shares = logits.split([item.drafts + 1 for item in work])
    for item, rows in zip(work, shares, strict=True):
        request, params = item.request, item.request.params
        if params.logit_bias:
            ids = upload([*params.logit_bias], rows.device)
            values = upload([*params.logit_bias.values()], rows.device).to(rows.dtype)
            rows.index_add_(1, ids, values.expand(len(rows), -1))
        missing = params.min_tokens - request.output_length
        if missing > 0 and request.stop_ids:
            stops = upload(sorted(request.stop_ids), rows.device)
            rows[:missing].index_fill_(1, stops, float("-inf"))
    if any(item.request.constraint is not None for item in work):
        _keep_to_forms(shares, work, drafts.tolist())


def _keep_to_forms(
    shares: Sequence[Tensor], work: Sequence[Scheduled], drafts: Sequence[int]
) -> None:
    """Rule out, in place, what forms do not allow. shares: [drafts + 1, vocab] of each request."""
    proposed, bound, masks = iter(drafts), [], []
    for item, rows in zip(work, shares, strict=True):
        own = list(itertools.islice(proposed, item.drafts))
        if item.request.constraint is not None:
            bound.append(rows)
            masks.append(item.request.constraint.allowed(own))
    bits = upload(torch.cat(masks), bound[0].device)
    forbidden = ~_unpacked(bits, bound[0].shape[1])
    for rows, mask in zip(bound, forbidden.split([len(rows) for rows in bound]), strict=True):
        rows.masked_fill_(mask, float("-inf"))


def _unpacked(bits: Tensor, count: int) -> Tensor:
    """The first `count` bits of each row, the lowest of a byte first. bits: [rows, bytes] uint8."""
    places = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits[:, :, None] >> places & 1).flatten(1)[:, :count].bool()


def _penalize(logits: Tensor, work: Sequence[Scheduled], drafts: Tensor) -> None:
    """Penalize in place. logits, drafts: as in `choose`."""
    shares = logits.split([item.drafts + 1 for item in work])
    proposals = drafts.split([item.drafts for item in work])
    for item, rows, proposed in zip(work, shares, proposals, strict=True):
        request, params = item.request, item.request.params
        if params.penalized:
            penalties = Penalties.none(1, rows.shape[1], rows.device)
            penalties.rates[0] = torch.tensor(params.penalties)
            known = torch.tensor(request.tokens, device=rows.device)
            penalties.begin(0, known[: request.prompt_length], known[request.prompt_length :])
            alone = torch.zeros(1, dtype=torch.int64, device=rows.device)
            penalize(rows, proposed[None], penalties, alone)


def sampling_of(requests: Sequence[Request], device: torch.device) -> Sampling:
    """How each of some requests samples."""
    params = [request.params for request in requests]
    return Sampling(
        temperature=torch.tensor([p.temperature for p in params], device=device),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], device=device),
        min_p=torch.tensor([p.min_p for p in params], device=device),
        seeds=torch.tensor([request.seed for request in requests], device=device),
    )

"""Which token each sampled row takes, by its request's sampling parameters."""

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.engine.batch import Scheduled
from peagle.engine.request import Request, TokenLogprobs
from peagle.ops.argmax import argmax
from peagle.ops.penalties import Penalties, penalize
from peagle.ops.sampling import Sampling, sample

AT_ONCE = 32
"""Rows that are sampled together: each takes 60 bytes a token of the vocabulary meanwhile."""


def choose(logits: Tensor, work: Sequence[Scheduled], drafts: Tensor) -> Tensor:
    """A token for every sampled row. logits: [sum(drafts + 1), vocab]; drafts: [sum(drafts)]."""
    if all(item.request.params.plain_greedy for item in work):
        return argmax(logits)
    shares = logits.split([item.drafts + 1 for item in work])
    proposals = drafts.split([item.drafts for item in work])
    processed = [
        _processed(item.request, share, proposal)
        for item, share, proposal in zip(work, shares, proposals, strict=True)
    ]
    places = [item.request.total + i for item in work for i in range(item.drafts + 1)]
    positions = torch.tensor(places, device=logits.device).split(AT_ONCE)
    rows = torch.cat(processed).split(AT_ONCE)
    settings = _sampling(work, logits.device).split(AT_ONCE)
    return torch.cat([sample(*part) for part in zip(rows, settings, positions, strict=True)])


def logprobs(request: Request, logits: Tensor, tokens: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of emitted tokens and of the most likely ones; none unless asked for.

    logits: [rows, vocab], the first of which chose `tokens`.
    """
    count = request.params.logprobs
    if count is None:
        return []
    scores = logits[: len(tokens)].float().log_softmax(dim=-1)
    values, ids = scores.topk(count)
    chosen = scores[torch.arange(len(tokens)), torch.tensor(tokens, device=scores.device)].tolist()
    pairs = [
        tuple(zip(*row, strict=True)) for row in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    return [TokenLogprobs(score, top) for score, top in zip(chosen, pairs, strict=True)]


def _processed(request: Request, logits: Tensor, drafts: Tensor) -> Tensor:
    """Bias, minimum length and penalties, each row seeing the drafts before it as output."""
    params = request.params
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=logits.device)
        values = torch.tensor(list(params.logit_bias.values()), device=logits.device)
        logits = logits.index_add(1, ids, values.to(logits.dtype).expand(len(logits), -1))
    if request.constraint is not None:
        allowed = request.constraint.allowed(drafts.tolist()).to(logits.device)
        logits = logits.masked_fill(~allowed, float("-inf"))
    missing = params.min_tokens - request.output_length
    if missing > 0 and request.stop_ids:
        logits = logits.clone()
        logits[:missing, sorted(request.stop_ids)] = float("-inf")
    if params.penalized:
        logits = logits.clone()
        penalties = Penalties.none(1, logits.shape[1], logits.device)
        penalties.rates[0] = torch.tensor(params.penalties)
        known = torch.tensor(request.tokens, device=logits.device)
        penalties.begin(0, known[: request.prompt_length], known[request.prompt_length :])
        alone = torch.zeros(1, dtype=torch.int64, device=logits.device)
        penalize(logits, drafts[None], penalties, alone)
    return logits


def _sampling(work: Sequence[Scheduled], device: torch.device) -> Sampling:
    requests = [item.request for item in work for _ in range(item.drafts + 1)]
    params = [request.params for request in requests]
    return Sampling(
        temperature=torch.tensor([p.temperature for p in params], device=device),
        top_k=torch.tensor([max(p.top_k, 0) for p in params], device=device),
        top_p=torch.tensor([p.top_p for p in params], device=device),
        min_p=torch.tensor([p.min_p for p in params], device=device),
        seeds=torch.tensor([request.seed for request in requests], device=device),
    )

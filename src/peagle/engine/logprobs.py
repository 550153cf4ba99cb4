"""Log-probabilities of tokens: of those that were chosen, and of prompts' own."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.config import MAX_LOGPROBS
from peagle.engine.batch import Scheduled
from peagle.engine.request import Request, TokenLogprobs
from peagle.transfer import Download, upload

STRIP = 128
"""Rows that are scored together: each takes 10 bytes a token of the vocabulary meanwhile."""


@dataclass(frozen=True)
class Scores:
    """The log-probability of a token for each row, and those of the most likely ones."""

    own: Tensor
    """[rows]"""
    ranks: Tensor
    """[rows] how many tokens are as likely, itself included."""
    values: Tensor
    """[rows, MAX_LOGPROBS], or as many as the vocabulary has."""
    ids: Tensor
    """Like `values`: whose those are. Always as many, so that of equally likely tokens a request
    sees the same ones whatever others ask for."""


def score(rows: Tensor, head: Callable[[Tensor], Tensor], tokens: Tensor) -> Scores:
    """Score a token for each row, in strips, so that the logits of all never exist at once.

    rows: [rows, ...], of which `head` makes logits [rows, vocab]; tokens: [rows].
    """
    strips = zip(rows.split(STRIP), tokens.split(STRIP), strict=True)
    parts = [_score(head(strip), ids) for strip, ids in strips]
    return Scores(*map(torch.cat, zip(*parts, strict=True)))


def _score(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores = logits.float().log_softmax(dim=-1)
    own = scores.gather(1, tokens[:, None])
    top = scores.topk(min(MAX_LOGPROBS, scores.shape[1]))
    return own[:, 0], (scores >= own).sum(dim=1), top.values, top.indices


class ScoreDownload:
    """Scores on their way to the host, each with the `top` most likely tokens."""

    def __init__(self, scores: Scores, top: int) -> None:
        columns = scores.own, scores.ranks, scores.ids[:, :top], scores.values[:, :top]
        self._columns = [Download(column) for column in columns]

    def tolist(self) -> list[TokenLogprobs]:
        """One for each row; waits for them."""
        own, ranks, ids, values = (column.tolist() for column in self._columns)
        tops = (tuple(zip(*pairs, strict=True)) for pairs in zip(ids, values, strict=True))
        return list(map(TokenLogprobs, own, ranks, tops))


def output_logprobs(
    requests: Sequence[Request], logits: Sequence[Tensor], tokens: Sequence[Sequence[int]]
) -> list[list[TokenLogprobs]]:
    """For each request those of its emitted tokens; none unless asked for.

    logits: [rows, vocab] of each request, the first of which chose its `tokens`.
    """
    found: list[list[TokenLogprobs]] = [[] for _ in requests]
    asked = [i for i, request in enumerate(requests) if request.params.logprobs is not None]
    if asked:
        rows = torch.cat([logits[i][: len(tokens[i])] for i in asked])
        chosen = upload([token for i in asked for token in tokens[i]], rows.device)
        scores = score(rows, lambda strip: strip, chosen.clamp(min=0))  # -1: the row is NaN
        counts = [requests[i].params.logprobs or 0 for i in asked]
        shares = zip((len(tokens[i]) for i in asked), counts, strict=True)
        entries = ScoreDownload(scores, max(counts)).tolist()
        for i, own in zip(asked, _divided(entries, shares), strict=True):
            found[i] = own
    return found


def scored_rows(work: Sequence[Scheduled]) -> list[int]:
    """The rows of a batch at which tokens of prompts are to be scored: those that follow them."""
    stops = itertools.accumulate(item.rows for item in work)
    return [
        stop - item.stop + place
        for item, stop in zip(work, stops, strict=True)
        for place in item.scored
    ]


class PromptLogprobs:
    """Those of the prompts in a batch, on their way to the host."""

    def __init__(self, work: Sequence[Scheduled], scores: Scores) -> None:
        """scores: of `scored_rows`."""
        asked = [item for item in work if item.scored]
        counts = [item.request.params.prompt_logprobs or 0 for item in asked]
        self._requests = [item.request.id for item in asked]
        self._shares = list(zip((len(item.scored) for item in asked), counts, strict=True))
        self._entries = ScoreDownload(scores, max(counts))

    def by_request(self) -> dict[str, list[TokenLogprobs]]:
        """One for each scored row, by request id; waits for them."""
        shares = _divided(self._entries.tolist(), self._shares)
        return dict(zip(self._requests, shares, strict=True))


def _divided(
    entries: Iterable[TokenLogprobs], shares: Iterable[tuple[int, int]]
) -> list[list[TokenLogprobs]]:
    """Entries by request. shares: how many rows each has, and how many likely tokens it wants."""
    rest = iter(entries)
    return [
        [replace(entry, top=entry.top[:count]) for entry in itertools.islice(rest, rows)]
        for rows, count in shares
    ]

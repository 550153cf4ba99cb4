"""Log-probabilities of tokens: of those that were chosen, and of prompts' own."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.config import MAX_LOGPROBS
from peagle.engine.spans import neighbours
from peagle.engine.step import PromptChunk, TokenLogprobs
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
    return _joined(_score(head(strip), ids) for strip, ids in strips)


def _joined(parts: Iterable[tuple[Tensor, Tensor, Tensor, Tensor]]) -> Scores:
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
    tops: Sequence[int | None], logits: Sequence[Tensor], tokens: Sequence[Sequence[int]]
) -> list[tuple[TokenLogprobs, ...]]:
    """For each request those of its emitted tokens.

    tops: how many likely tokens each request wants; None: it wants nothing. logits: [rows, vocab]
    of each, the first of which chose its `tokens`.
    """
    found: list[tuple[TokenLogprobs, ...]] = [() for _ in tops]
    asked = [(i, top) for i, top in enumerate(tops) if top is not None]
    if asked:
        rows = [logits[i][: len(tokens[i])] for i, _ in asked]
        chosen = upload([token for i, _ in asked for token in tokens[i]], rows[0].device)
        counts = [len(of) for of in rows]
        ids = chosen.clamp(min=0).split(counts)  # -1: the row is NaN
        together = neighbours(counts, STRIP)
        strips = ((torch.cat(rows[own]), torch.cat(ids[own])) for own in together)
        scores = _joined(_score(*strip) for strip in strips)
        shares = [(len(tokens[i]), top) for i, top in asked]
        entries = ScoreDownload(scores, max(top for _, top in asked)).tolist()
        for (i, _), own in zip(asked, _divided(entries, shares), strict=True):
            found[i] = own
    return found


def scored_rows(chunks: Sequence[PromptChunk]) -> list[int]:
    """The rows of some chunks at which tokens of prompts are scored: those that follow them."""
    stops = itertools.accumulate(chunk.rows for chunk in chunks)
    return [
        stop - chunk.stop + place
        for chunk, stop in zip(chunks, stops, strict=True)
        for place in chunk.scored
    ]


class PromptLogprobs:
    """Those of the prompts in a batch, on their way to the host."""

    def __init__(self, chunks: Sequence[PromptChunk], scores: Scores) -> None:
        """scores: of `scored_rows`."""
        asked = [chunk for chunk in chunks if chunk.scored]
        self._rows = [chunk.row for chunk in asked]
        self._shares = [(len(chunk.scored), chunk.top) for chunk in asked]
        self._entries = ScoreDownload(scores, max(chunk.top for chunk in asked))

    def by_row(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """One for each scored position, by table row; waits for them."""
        shares = _divided(self._entries.tolist(), self._shares)
        return dict(zip(self._rows, shares, strict=True))


def _divided(
    entries: Iterable[TokenLogprobs], shares: Iterable[tuple[int, int]]
) -> list[tuple[TokenLogprobs, ...]]:
    """Entries by request. shares: how many rows each has, and how many likely tokens it wants."""
    rest = iter(entries)
    return [
        tuple(replace(entry, top=entry.top[:top]) for entry in itertools.islice(rest, rows))
        for rows, top in shares
    ]

"""Penalties on the tokens that a request has already, as OpenAI and vLLM define them."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.config import NO_PENALTIES
from peagle.ops.triton import in_kernels

PROMPT = 1 << 30
"""What a token of the prompt adds to its count."""


class Penalties(NamedTuple):
    """The penalties of each request, by its row in the request table."""

    rates: Tensor
    """[table rows, 3]: repetition divides positive logits of every token of prompt and output, and
    multiplies negative ones; presence is subtracted once from every token of the output; frequency
    as often as the token was written."""
    counts: Tensor
    """[table rows, vocab] int32, how often each token was written, for requests with penalties."""

    @classmethod
    def none(cls, rows: int, vocab: int, device: torch.device) -> "Penalties":
        """A table in which no request has penalties."""
        rates = torch.tensor(NO_PENALTIES, device=device).repeat(rows, 1)
        return cls(rates, torch.zeros(rows, vocab, dtype=torch.int32, device=device))

    def begin(self, row: int, prompt: Tensor, output: Tensor) -> None:
        """Count a request's tokens. prompt, output: [tokens] int64."""
        counts = self.counts[row]
        counts.zero_()
        counts.index_fill_(0, prompt, PROMPT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=torch.int32))


@in_kernels("penalties")
def penalize(logits: Tensor, drafts: Tensor, penalties: Penalties, requests: Tensor) -> None:
    """Penalize logits in place; each row counts the drafts before it as output.

    logits: [requests * (drafts + 1), vocab]; drafts: [requests, drafts]; requests: table rows.
    """
    of_requests = logits.view(len(requests), drafts.shape[1] + 1, -1)
    for rows, proposed, row in zip(of_requests, drafts, requests.tolist(), strict=True):
        repetition, presence, frequency = rates = tuple(penalties.rates[row].tolist())
        if rates == NO_PENALTIES:
            continue
        before = F.pad(F.one_hot(proposed, rows.shape[1]), (0, 0, 1, 0)).cumsum(dim=0)
        counts = penalties.counts[row] + before
        written = counts % PROMPT
        values = rows.float()
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts > 0, repeated, values)
        rows.copy_(values - frequency * written - presence * (written > 0))


@in_kernels("penalties")
def count_emitted(penalties: Penalties, requests: Tensor, emitted: Tensor, numbers: Tensor) -> None:
    """Count the tokens that requests have just emitted.

    requests: table rows; emitted: [table rows, most]; numbers: [table rows] tokens of each.
    """
    for row in requests.tolist():
        if tuple(penalties.rates[row].tolist()) != NO_PENALTIES:
            tokens = emitted[row, : int(numbers[row])]
            ones = torch.ones_like(tokens, dtype=torch.int32)
            penalties.counts[row].index_add_(0, tokens, ones)

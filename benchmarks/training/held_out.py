"""Acceptance length on held-out conversations, with bootstrap intervals."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from peagle.train.estimate import cycles
from peagle.train.packing import Batch

RESAMPLES = 4000
Counts = Sequence[tuple[int, int]]
"""Tokens and cycles of each conversation."""


def count(agreement: Iterable[tuple[Batch, Tensor, Tensor]], k: int) -> list[tuple[int, int]]:
    """Tokens and cycles of each conversation with K drafts per cycle; short ones are left out.

    agreement: from `Trainer.agreement`.
    """
    counts = []
    for batch, tables, _ in agreement:
        begins = (batch.positions == 0).nonzero().flatten().tolist()
        lengths = torch.tensor([*begins, len(batch)]).diff().tolist()
        for table in tables[:, :k].split(lengths):
            emitted = cycles(table)
            if emitted:
                counts.append((sum(emitted), len(emitted)))
    return counts


def acceptance_length(counts: Counts) -> float:
    """Tokens per cycle."""
    return sum(tokens for tokens, _ in counts) / sum(cycles for _, cycles in counts)


def interval(counts: Counts) -> tuple[float, float]:
    """95 % bootstrap interval over the conversations."""
    return _bounds(_resampled(counts))


def difference(counts: Counts, others: Counts) -> tuple[float, float, float]:
    """AL minus the others', and its 95 % interval, paired by conversation."""
    low, high = _bounds(_resampled(counts) - _resampled(others))
    return acceptance_length(counts) - acceptance_length(others), low, high


def _resampled(counts: Counts) -> Tensor:
    """[resamples] AL of random draws of conversations, the same draws for all counts."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(counts), (RESAMPLES, len(counts)), generator=generator)
    tokens, cycles = torch.tensor(counts, dtype=torch.float64).T
    return tokens[draws].sum(1) / cycles[draws].sum(1)


def _bounds(samples: Tensor) -> tuple[float, float]:
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return low, high

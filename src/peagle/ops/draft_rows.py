"""Where a parallel drafter's rows come from: known tokens with real features, then mask slots."""

from collections.abc import Sequence

import torch
from torch import Tensor


def draft_rows(
    counts: Sequence[int], ks: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Lay out one request after another: its `count` known rows, then `k - 1` mask slots.

    Returns the source of each row, an index into the concatenated known rows or `sum(counts)` for a
    mask slot, and the rows at which drafts are read: the last known row and the mask slots of each
    request with k > 0. With k = 0 a request only writes keys and values.
    """
    sources: list[int] = []
    reads: list[int] = []
    known, mask = 0, sum(counts)
    for count, k in zip(counts, ks, strict=True):
        sources += range(known, known + count)
        known += count
        if k > 0:
            reads += range(len(sources) - 1, len(sources) - 1 + k)
            sources += [mask] * (k - 1)
    return _index(sources, device), _index(reads, device)


def _index(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)

"""Where a drafter's rows come from: known tokens with real features, then mask slots."""

from collections.abc import Sequence

import torch
from torch import Tensor


def draft_rows(counts: Sequence[int], masks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Lay out one request after another: its `count` known rows, then `masks` mask slots.

    Returns the source of each row, an index into the concatenated known rows or `sum(counts)` for a
    mask slot, and the rows at which drafts are read: the last known row and the mask slots of each
    request.
    """
    sources: list[int] = []
    reads: list[int] = []
    known, mask = 0, sum(counts)
    for count in counts:
        sources += range(known, known + count)
        known += count
        reads += range(len(sources) - 1, len(sources) + masks)
        sources += [mask] * masks
    return _index(sources, device), _index(reads, device)


def _index(rows: list[int], device: torch.device) -> Tensor:
    return torch.tensor(rows, dtype=torch.int64, device=device)

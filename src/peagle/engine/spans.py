"""Spans of requests as rows of one pass: positions, cache slots, tiles of attention."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.request_table import RequestTable
from peagle.ops.cached_attention import PassRows
from peagle.transfer import upload

TILE = 16
"""Most rows of a span that one program of the attention kernel takes."""


@dataclass(frozen=True)
class Span:
    """Consecutive positions of one request, given by its row in the request table."""

    row: int
    start: int
    count: int


def neighbours(counts: Sequence[int], most: int) -> Iterator[slice]:
    """Neighbours that have so many rows together at most, or are one. counts: rows of each."""
    start, held = 0, 0
    for index, count in enumerate(counts):
        if held and held + count > most:
            yield slice(start, index)
            start, held = index, 0
        held += count
    yield slice(start, len(counts))


def places(slots: Tensor, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Position and cache slot of every row of some spans, in the order given: [rows] each.

    slots: [table rows, positions].
    """
    device = slots.device
    positions = torch.cat([torch.arange(s.start, s.start + s.count, device=device) for s in spans])
    rows = upload([s.row for s in spans for _ in range(s.count)], device)
    return positions, slots[rows, positions]


def tile_rows(table: RequestTable, spans: Sequence[Span], most: int = TILE) -> PassRows:
    """The rows of some spans, in the order given, each `most` of a span as a request of its own."""
    slots = table.slots
    tiles = [
        (span.row, start, min(most, span.start + span.count - start))
        for span in spans
        for start in range(span.start, span.start + span.count, most)
    ]
    columns = zip(*tiles, strict=True)
    requests, starts, counts = (upload(column, slots.device) for column in columns)
    laid = requests, starts, counts.cumsum(0) - counts, counts, *places(slots, spans)
    return PassRows(slots, table.limits, *laid, most=max(count for _, _, count in tiles))

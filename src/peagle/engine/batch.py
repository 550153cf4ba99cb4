"""One pass's immutable inputs, gathered from the request table."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.drafter import Span
from peagle.engine.request import Request
from peagle.engine.request_table import RequestTable
from peagle.ops.attention import AttentionGroup, causal_bias
from peagle.ops.cached_attention import PassRows
from peagle.transfer import upload

TILE = 16
"""Most rows of a span that one program of the attention kernel takes."""


@dataclass(frozen=True)
class Scheduled:
    """A request's share of one step: a prefill chunk, or its newest token and K drafts."""

    request: Request
    rows: int
    """Target rows: the chunk's length, or the drafts plus one."""
    drafts: int
    """Draft tokens in this step, at most K; 0 for a prefill chunk."""
    start: int
    """Position of its first row; for a resident request, the furthest that it can be."""
    completes: bool
    """Whether the last row's logits give the request its next token."""

    @property
    def stop(self) -> int:
        """Position after its last row."""
        return self.start + self.rows

    @property
    def tokens(self) -> list[int]:
        """The tokens of a prefill chunk."""
        return self.request.tokens[self.start : self.stop]

    @property
    def scored(self) -> range:
        """Of its positions, those whose next token's log-probability the prompt still needs."""
        wanted = self.request.unscored
        return range(max(self.start, wanted.start), min(self.stop, wanted.stop))

    @property
    def following(self) -> list[int]:
        """The token after each of them; at the prompt's end, its last one again."""
        tokens = self.request.tokens
        return [*tokens[self.start + 1 : self.stop + 1], *tokens[-1:]][: self.rows]


@dataclass(frozen=True)
class Rows:
    """Positions of a pass and where their keys are: what attention needs to know."""

    positions: Tensor
    """[rows]"""
    slots: Tensor
    """[rows] cache slot that each row writes."""
    groups: tuple[AttentionGroup, ...]


def gather_rows(table: RequestTable, spans: Sequence[Span], dtype: torch.dtype) -> Rows:
    """The rows of some spans, in the order given, grouped by their number of queries."""
    positions, slots = places(table, spans)
    firsts, counts = _firsts(spans), sorted({span.count for span in spans})
    groups = tuple(
        _group(table, spans, [i for i, s in enumerate(spans) if s.count == count], firsts, dtype)
        for count in counts
    )
    return Rows(positions, slots, groups)


def places(table: RequestTable, spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Position and cache slot of every row of some spans, in the order given: [rows] each."""
    device = table.slots.device
    positions = torch.cat([torch.arange(s.start, s.start + s.count, device=device) for s in spans])
    rows = upload([s.row for s in spans for _ in range(s.count)], device)
    return positions, table.slots[rows, positions]


def _firsts(spans: Sequence[Span]) -> list[int]:
    """The batch row at which each span begins."""
    firsts = [0]
    for span in spans[:-1]:
        firsts.append(firsts[-1] + span.count)
    return firsts


def _group(
    table: RequestTable,
    spans: Sequence[Span],
    members: list[int],
    firsts: list[int],
    dtype: torch.dtype,
) -> AttentionGroup:
    device, count = table.slots.device, spans[members[0]].count
    context = max(spans[i].start for i in members) + count
    offsets = torch.arange(count, device=device)
    starts = upload([spans[i].start for i in members], device)
    stops = starts + count
    rows = upload([firsts[i] for i in members], device)
    table_rows = upload([spans[i].row for i in members], device)
    return AttentionGroup(
        rows=(rows[:, None] + offsets).view(-1),
        slots=table.context(table_rows, stops, context),
        bias=causal_bias(starts[:, None] + offsets, context, dtype),
    )


def tile_rows(table: RequestTable, spans: Sequence[Span]) -> PassRows:
    """The rows of some spans, in the order given, each `TILE` of a span as a request of its own."""
    tiles = [
        (span.row, start, min(TILE, span.start + span.count - start))
        for span in spans
        for start in range(span.start, span.start + span.count, TILE)
    ]
    columns = zip(*tiles, strict=True)
    requests, starts, counts = (upload(column, table.slots.device) for column in columns)
    positions, writes = places(table, spans)
    return PassRows(
        slots=table.slots,
        limits=table.limits,
        requests=requests,
        starts=starts,
        firsts=counts.cumsum(0) - counts,
        counts=counts,
        positions=positions,
        writes=writes,
        most=max(count for _, _, count in tiles),
    )

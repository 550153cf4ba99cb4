"""EAGLE-3: K tokens from K passes, each fed the drafter's own last output."""

import torch
from torch import Tensor

from peagle.drafters.drafter import DraftWork, Memory, Span
from peagle.drafters.model import DraftModel
from peagle.ops.drafts import Drafts


class SequentialDrafter:
    """One pass over the known rows gives the first token, K - 1 passes of one row each the rest."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model

    def propose(self, work: DraftWork, memory: Memory) -> Drafts:
        """Draft token by token; requests with a smaller K skip the later passes."""
        positions, attend = memory.open(work.spans)
        features = self.model.project(work.features)
        hidden = self.model(work.tokens, features, positions, attend)
        active, readout = work.active, self.model.readout
        if not active:
            return Drafts(work.tokens[:0])
        hidden = hidden.index_select(0, self._last_rows(work, active))
        columns = [readout.draft(hidden, 1, work.race_of(active))]
        for step in range(1, max(work.ks)):
            still = [i for i in active if work.ks[i] > step]
            keep = torch.tensor([active.index(i) for i in still], device=hidden.device)
            hidden, tokens = hidden[keep], columns[-1].tokens[keep, 0]
            active = still
            positions, attend = memory.open([self._next(work.spans[i], step) for i in active])
            hidden = self.model(tokens, self.model.feedback(hidden), positions, attend)
            columns.append(readout.draft(hidden, 1, work.race_of(active), step))
        return _by_request(columns, work.ks)

    @staticmethod
    def _next(span: Span, step: int) -> Span:
        return Span(span.row, span.start + span.count - 1 + step, 1)

    @staticmethod
    def _last_rows(work: DraftWork, active: list[int]) -> Tensor:
        ends = torch.tensor([span.count for span in work.spans]).cumsum(0) - 1
        return ends[active].to(work.tokens.device)


def _by_request(columns: list[Drafts], ks: tuple[int, ...]) -> Drafts:
    """Drafts by step -> drafts by request. columns[step]: those of requests with k > step."""
    sizes = [len(column.tokens) for column in columns]
    starts = [sum(sizes[:step]) for step in range(len(sizes))]
    order: list[int] = []
    for k in ks:
        order += starts[:k]
        starts = [start + (step < k) for step, start in enumerate(starts)]
    flat = torch.cat([column.tokens for column in columns])[:, 0]
    which = torch.tensor(order, device=flat.device)
    others = [c.alternatives for c in columns if c.alternatives is not None]
    alternatives = torch.cat(others)[:, 0][which] if others else None
    return Drafts(flat[which], alternatives)

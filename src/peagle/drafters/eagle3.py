"""EAGLE-3: K tokens from K passes, each fed the drafter's own last output.

`SequentialDrafter` drafts for requests of any K; `ResidentSequential` does in a captured cycle.
"""

from dataclasses import replace

import torch
from torch import Tensor

from peagle.drafters.drafter import DrafterCache, DraftWork, Span
from peagle.drafters.model import DraftModel
from peagle.drafters.resident import CycleShape, OpenPass, ResidentDrafter
from peagle.ops.drafts import Drafts
from peagle.ops.race import Race
from peagle.ops.resident import ResidentState, draft_inputs


class SequentialDrafter:
    """One pass over the known rows gives the first token, K - 1 passes of one row each the rest."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model

    def propose(self, work: DraftWork, cache: DrafterCache) -> Drafts:
        """Draft token by token; requests with a smaller K skip the later passes."""
        positions, attend = cache.open(work.spans)
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
            positions, attend = cache.open([self._next(work.spans[i], step) for i in active])
            hidden = self.model(tokens, self.model.feedback(hidden), positions, attend)
            columns.append(readout.draft(hidden, 1, work.race_of(active), step))
        return _by_request(columns, work.ks)

    def resident(self) -> "ResidentSequential":
        """The same for a captured cycle."""
        return ResidentSequential(self.model)

    @staticmethod
    def _next(span: Span, step: int) -> Span:
        return Span(span.row, span.start + span.count - 1 + step, 1)

    @staticmethod
    def _last_rows(work: DraftWork, active: list[int]) -> Tensor:
        ends = torch.tensor([span.count for span in work.spans]).cumsum(0) - 1
        return ends[active].to(work.tokens.device)


class ResidentSequential(ResidentDrafter):
    """A pass over the pending rows, then for each further draft one row per request."""

    def propose(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Drafts:
        requests, readout = race.requests, self.model.readout
        inputs = draft_inputs(state, requests, shape.pending, 0, self.norms)
        stream, hidden = self.run(inputs, open_pass)
        columns = [readout.draft_normed(hidden, 1, race)]
        one_each = torch.arange(len(requests), device=requests.device)
        # later passes use a table of their own, with one row per request of the batch
        state = replace(
            state,
            slots=state.slots.index_select(0, requests),
            limits=state.limits.index_select(0, requests),
            computed=state.computed.index_select(0, requests),
            pending=torch.ones_like(one_each),
        )
        for step in range(1, shape.drafts):
            state_of_step = replace(
                state,
                computed=state.computed + step,
                emitted=columns[-1].tokens,
                features=self.model.feedback(stream)[:, None],
            )
            inputs = draft_inputs(state_of_step, one_each, 1, 0, self.norms)
            stream, hidden = self.run(inputs, open_pass)
            columns.append(readout.draft_normed(hidden, 1, race, step))
        return Drafts.beside(columns)


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

"""Drafting from state that stays on the device: both methods again, for a captured cycle."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.drafters.drafter import Drafter
from peagle.drafters.model import DraftModel
from peagle.drafters.peagle import ParallelDrafter
from peagle.models.fused import AttendProduct, FusedLayers
from peagle.ops.cached_attention import PassRows
from peagle.ops.drafts import Drafts
from peagle.ops.norm import rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race
from peagle.ops.resident import DraftInputs, FirstNorms, ResidentState, draft_inputs

OpenPass = Callable[[PassRows], AttendProduct]
"""The drafter's KV cache: gives the attention for one pass over some rows."""


@dataclass(frozen=True)
class CycleShape:
    """How many rows a cycle has for each of its requests."""

    drafts: int
    """Drafts; 0 without a drafter, or while it pauses."""
    pending: int
    """The largest number of rows of a request that the drafter has not seen."""


class ResidentDrafter(ABC):
    """Proposes tokens for each of some rows of the request table."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.layers = fused_drafter(model)
        self._norms = first_norms(model)

    @abstractmethod
    def propose(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Drafts:
        """Drafts [requests, drafts] for the race's requests."""

    def _pass(self, inputs: DraftInputs, open_pass: OpenPass) -> tuple[Tensor, Normed]:
        """The residual stream [reads, hidden_size] of the rows that give drafts, and its norm."""
        first = Normed(inputs.x, None, self._norms.eps)
        attend = open_pass(inputs.rows)
        reads = inputs.reads.flatten()
        return self.layers(inputs.stream, first, attend, reads=reads, live=inputs.live)


class ResidentParallel(ResidentDrafter):
    """P-EAGLE: pending rows and mask slots in one pass."""

    def propose(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Drafts:
        inputs = draft_inputs(state, race.requests, shape.pending, shape.drafts - 1, self._norms)
        _, hidden = self._pass(inputs, open_pass)
        return self.model.readout.draft_normed(hidden, shape.drafts, race)


class ResidentSequential(ResidentDrafter):
    """EAGLE-3: a pass over the pending rows, then for each further draft one row per request."""

    def propose(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Drafts:
        requests, readout = race.requests, self.model.readout
        inputs = draft_inputs(state, requests, shape.pending, 0, self._norms)
        stream, hidden = self._pass(inputs, open_pass)
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
            inputs = draft_inputs(state_of_step, one_each, 1, 0, self._norms)
            stream, hidden = self._pass(inputs, open_pass)
            columns.append(readout.draft_normed(hidden, 1, race, step))
        return Drafts.beside(columns)


def resident_drafter(drafter: Drafter) -> ResidentDrafter:
    """The form of a drafter that a captured cycle runs."""
    kind = ResidentParallel if isinstance(drafter, ParallelDrafter) else ResidentSequential
    return kind(drafter.model)


def fused_drafter(model: DraftModel) -> FusedLayers:
    """The layers of a drafter."""
    layers = [model.first, *model.rest]
    return FusedLayers(layers, model.readout.norm, [model.rotations] * len(layers))


def first_norms(model: DraftModel) -> FirstNorms:
    """What comes before a drafter's first layer."""
    first, mask_token = model.first, model.config.mask_token_id
    if mask_token is None:
        mask_feature = torch.zeros_like(first.hidden_norm.weight)
    else:
        mask_feature = model.mask_feature()[0].contiguous()
    return FirstNorms(
        embedding=model.embed.weight,
        input_weight=first.input_norm.weight,
        hidden_weight=first.hidden_norm.weight,
        eps=first.input_norm.eps,
        before_residual=model.config.norm_before_residual,
        mask_token=mask_token or 0,
        mask_feature=mask_feature,
    )


def known_inputs(model: DraftModel, tokens: Tensor, features: Tensor) -> tuple[Tensor, Normed]:
    """The first layer's stream and input for rows without mask slots.

    tokens: [rows], those after each position; features: [rows, hidden_size], projected.
    """
    first = model.first
    embedded = rms_norm(model.embed(tokens), first.input_norm.weight, first.input_norm.eps)
    scaled = rms_norm(features, first.hidden_norm.weight, first.hidden_norm.eps)
    stream = scaled if model.config.norm_before_residual else features
    return stream, Normed(torch.cat((embedded, scaled), dim=-1), None, first.input_norm.eps)

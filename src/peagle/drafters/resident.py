"""Drafting from state that stays on the device, for a captured cycle: what both methods share."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.models.fused import AttendProduct, FusedLayers
from peagle.ops.cached_attention import PassRows
from peagle.ops.drafts import Drafts
from peagle.ops.norm import rms_norm
from peagle.ops.products.normed import Normed
from peagle.ops.race import Race
from peagle.ops.resident import DraftInputs, FirstNorms, ResidentState

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
        self.norms = first_norms(model)

    @abstractmethod
    def propose(
        self, state: ResidentState, race: Race, shape: CycleShape, open_pass: OpenPass
    ) -> Drafts:
        """Drafts [requests, drafts] for the race's requests."""

    def run(self, inputs: DraftInputs, open_pass: OpenPass) -> tuple[Tensor, Normed]:
        """The residual stream [reads, hidden_size] of the rows that give drafts, and its norm."""
        first = Normed(inputs.x, None, self.norms.eps)
        attend = open_pass(inputs.rows)
        reads = inputs.reads.flatten()
        return self.layers(inputs.stream, first, attend, reads=reads, live=inputs.live)


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

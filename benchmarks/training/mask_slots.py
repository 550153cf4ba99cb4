"""What the paper tried in mask slots besides one shared hidden state (section 4.1)."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafters.model import DraftModel
from peagle.ops.linear import Linear
from peagle.train.cod import Chains, Elements
from peagle.train.context import Shared
from peagle.train.features import Features
from peagle.train.packing import Batch
from peagle.train.partition import ParallelPass
from peagle.train.trainer import Trainer
from peagle.transfer import to_device

SPREAD = 0.02
"""Standard deviation of new weights, as for a drafter's other weights."""


@dataclass(frozen=True)
class MaskSlot:
    """A hidden state of mask slots: h_shared and what is added to it, all before `fc`."""

    depth: bool = False
    """An embedding of the slot's depth."""
    anchor: bool = False
    """A projection of the anchor's own target feature, the only real one of its chain."""
    regularised: bool = False
    """The projection is scaled by a learned number that begins at 0.1, after a dropout of 0.1."""


SHARED = MaskSlot()
SLOTS = {
    "shared": SHARED,
    "+ depth": MaskSlot(depth=True),
    "+ NTP hidden": MaskSlot(anchor=True),
    "+ NTP hidden + depth": MaskSlot(depth=True, anchor=True),
    "+ regularised NTP hidden": MaskSlot(anchor=True, regularised=True),
}


class Additions(nn.Module):
    """What is added to `mask_hidden`, element by element."""

    def __init__(self, slot: MaskSlot, width: int, depths: int) -> None:
        super().__init__()
        # three dimensions, so that the optimizer does not take it for a layer's matrix
        self.depths = nn.Parameter(SPREAD * torch.randn(depths, 1, width)) if slot.depth else None
        self.anchor = Linear(width, width) if slot.anchor else None
        self.scale = nn.Parameter(torch.tensor(0.1)) if slot.regularised else None
        if self.anchor is not None:
            nn.init.normal_(self.anchor.weight, std=SPREAD)

    def forward(self, features: Tensor, depths: Tensor) -> Tensor:
        """features: [elements, width] of the anchors; depths: [elements]."""
        added = torch.zeros_like(features)
        if self.anchor is not None:
            projected = self.anchor(features)
            if self.scale is not None:
                projected = self.scale * nn.functional.dropout(projected, 0.1, self.training)
            added = added + projected
        if self.depths is not None:
            added = added + self.depths[depths, 0]
        return added


class AddingPass(ParallelPass):
    """A pass with mask slots that differ from one another."""

    def mask_slots(self, elements: Elements, shared: Shared) -> tuple[Tensor, Tensor]:
        features = self._features.tapped
        anchors, depths = to_device(features.device, elements.anchors, elements.depths)
        added = self._model.additions(features[anchors], depths)
        slots = self._model.project(self._model.mask_hidden + added)
        return shared.mask_embedding.expand_as(slots), slots


class AddingTrainer(Trainer):
    """Trains a drafter with `Additions`."""

    def agreement(self) -> Any:
        self.model.eval()
        yield from super().agreement()
        self.model.train()

    def _pass(self, batch: Batch, features: Features, chains: Chains) -> AddingPass:
        limits = self._segment, self.recipe.activation_checkpointing
        return AddingPass(self.model, batch, features, chains, *limits)


def trainer_for(slot: MaskSlot, model: DraftModel, depths: int) -> type[Trainer]:
    """The trainer of a drafter with such slots; adds the modules that they need to the drafter."""
    if slot == SHARED:
        return Trainer
    weight = model.fc.weight
    model.additions = Additions(slot, model.config.feature_size, depths).to(weight)
    return AddingTrainer

"""A drafter's layers in few launches: the fast twin of `DraftModel.forward`, same weights."""

import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.drafters.proposer import Hidden
from peagle.models.fused import AttendProduct, FusedLayers
from peagle.ops.cycle_state import DraftInputs, FirstNorms
from peagle.ops.norm import rms_norm
from peagle.ops.products.normed import Normed


class FusedDrafter:
    """A drafter's network for rows whose inputs are on the device."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        layers = [model.first, *model.rest]
        tables = dict.fromkeys(range(len(layers)), (model.rotations, None))
        self.layers = FusedLayers(layers, model.readout.norm, tables)
        self.norms = first_norms(model)

    def run(self, inputs: DraftInputs, attend: AttendProduct) -> Hidden:
        """The output of the rows that give drafts."""
        first = Normed(inputs.x, None, self.norms.eps)
        return Hidden(*self.layers(inputs.stream, first, attend, reads=inputs.reads.flatten()))

    def fill(self, following: Tensor, features: Tensor, attend: AttendProduct) -> None:
        """Write the keys and values of known rows.

        following: [rows] the token after each row's; features: [rows, hidden_size], projected.
        """
        stream, first = known_inputs(self.model, following, features)
        self.layers(stream, first, attend, reads=following[:0])


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

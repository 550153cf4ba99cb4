"""A drafter's layers in few launches: the fast twin of `Network.forward`, same weights."""

import torch
from torch import Tensor

from peagle.drafters.network import Network
from peagle.drafters.proposer import Hidden
from peagle.models.fused import AttendProduct, FusedLayers
from peagle.ops.cycle_state import DraftInputs
from peagle.ops.norm import rms_norm
from peagle.ops.products.normed import Normed


class FusedDrafter:
    """A drafter's network for rows whose inputs are on the device."""

    def __init__(self, model: Network) -> None:
        self.model, self.norms = model, model.first_norms()
        tables = dict.fromkeys(range(len(model.blocks)), (model.rotations, None))
        self.layers = FusedLayers(model.blocks, model.readout.norm, tables)

    def run(self, inputs: DraftInputs, attend: AttendProduct) -> Hidden:
        """The output of the rows that give drafts."""
        stream, first = self.model.begin(inputs.x, inputs.stream)
        return Hidden(*self.layers(stream, first, attend, reads=inputs.reads.flatten()))

    def fill(self, following: Tensor, features: Tensor, attend: AttendProduct) -> None:
        """Write the keys and values of known rows.

        following: [rows] the token after each row's; features: [rows, hidden_size], projected.
        """
        stream, first = self.known(following, features)
        self.layers(stream, first, attend, reads=following[:0])

    def known(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Normed]:
        """The first layer's stream and input for rows without mask slots.

        tokens: [rows], those after each position; features: [rows, hidden_size], projected.
        """
        norms = self.norms
        embedded = rms_norm(self.model.embed(tokens), norms.input_weight, norms.eps)
        scaled = rms_norm(features, norms.hidden_weight, norms.eps)
        stream = scaled if norms.before_residual else features
        return self.model.begin(torch.cat((embedded, scaled), dim=-1), stream)

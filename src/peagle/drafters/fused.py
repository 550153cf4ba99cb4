"""A drafter's layers in few launches: the fast twin of `Network.forward`, same weights."""

import torch
from torch import Tensor

from peagle.drafters.dflash import BlockModel, block_depths
from peagle.drafters.network import Network
from peagle.drafters.proposer import Hidden
from peagle.models.decoder import Attention
from peagle.models.fused import AttendProduct, FusedLayers
from peagle.ops import residual
from peagle.ops.cached_attention import QKVSpec
from peagle.ops.cycle_state import DraftInputs
from peagle.ops.norm import rms_norm
from peagle.ops.products.normed import Normed


class FusedDrafter:
    """A drafter's network for rows whose inputs are on the device."""

    def __init__(self, model: Network) -> None:
        self.model, self.norms = model, model.first_norms()
        tables = dict.fromkeys(range(len(model.blocks)), (model.rotations, None))
        self.layers = FusedLayers(model.blocks, model.readout.norm, tables)

    def run(
        self, inputs: DraftInputs, attend: AttendProduct, first: Tensor | None = None
    ) -> Hidden:
        """The output of the rows that give drafts; first: as of `ProposerRows`."""
        stream, x = self.model.begin(inputs.x, inputs.stream)
        return Hidden(*self.layers(stream, x, attend, reads=inputs.reads.flatten()))

    def fill(self, following: Tensor, features: Tensor, attend: AttendProduct) -> None:
        """Write the keys and values of known rows.

        following: [rows] the token after each row's; features: [rows, hidden_size], projected.
        """
        norms = self.norms
        embedded = rms_norm(self.model.embed(following), norms.input_weight, norms.eps)
        scaled = rms_norm(features, norms.hidden_weight, norms.eps)
        stream = scaled if norms.before_residual else features
        begun = self.model.begin(torch.cat((embedded, scaled), dim=-1), stream)
        self.layers(*begun, attend, reads=following[:0])


class FusedBlock(FusedDrafter):
    """The same of a DFlash head, whose layers run for the blocks' rows alone: features take the
    place of known positions' inputs in each."""

    model: BlockModel

    def run(
        self, inputs: DraftInputs, attend: AttendProduct, first: Tensor | None = None
    ) -> Hidden:
        """As `FusedDrafter`."""
        assert first is not None, "a block begins with the newest token"
        model, slots = self.model, inputs.reads[:, 1:]
        places = slots.flatten()
        x = model.begun(inputs.stream, first, slots[:, 0])
        known = [self._product(layer.attention, x) for layer in model.blocks]
        stream = x[places]

        def beside(index: int, product: Tensor, spec: QKVSpec) -> Tensor:
            whole = known[index].index_copy_(0, places, product)
            return attend(index, whole, spec)[places]

        def mix(index: int, attention: Attention, x: Tensor) -> Tensor:
            attended = beside(index, self._product(attention, x), self.layers.specs[index])
            return residual.linear(Normed(attended, None, attention.eps), attention.out)

        drafts = torch.arange(len(places), device=x.device).view(slots.shape)[:, 1:].flatten()
        if model.config.conv is None:
            begun = residual.normed(stream, model.blocks[0].input_norm)
            return Hidden(*self.layers(stream, begun, beside, reads=drafts))
        stream = model.over(stream, block_depths(slots), mix).index_select(0, drafts)
        return Hidden(stream, residual.normed(stream, model.readout.norm))

    def fill(self, following: Tensor, features: Tensor, attend: AttendProduct) -> None:
        """As `FusedDrafter`, whatever follows."""
        for index, layer in enumerate(self.model.blocks):
            attend(index, self._product(layer.attention, features), self.layers.specs[index])

    def _product(self, attention: Attention, x: Tensor) -> Tensor:
        return residual.linear(Normed(x, None, attention.eps), attention.qkv)


def fused_drafter(model: Network) -> FusedDrafter:
    """The fast twin of a network."""
    return FusedBlock(model) if isinstance(model, BlockModel) else FusedDrafter(model)

"""DFlash and DFlash 2: K tokens from one pass over a block whose rows see each other.

The target's feature c of a known position p, projected and normed once, is not a row of the layers:
each layer makes its key and value at p of it. A block stands behind: the newest token, at its own
position n, and K mask tokens; the row of position n + j gives the draft there.

                  known positions 0 .. n-1          block n .. n+K
    layer's input c, the same in every layer        norm of the block's stream
    sees          (nothing: its output is unread)   all keys up to n+K, or up to its own

DFlash 2 mixes each sublayer's input and output with the rows before, inside the block alone, and
corrects drafts by the draft before. Source: dflash 0.1.0 (z-lab), vLLM 0.33's `qwen3_dflash.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peagle.drafters.kind import DFLASH
from peagle.drafters.model import LayerCall, call_plainly
from peagle.drafters.network import Network, NetworkConfig
from peagle.drafters.peagle import PEagle
from peagle.drafters.proposer import ProposerRows
from peagle.drafters.readout import Readout
from peagle.models.decoder import Attend, Attention, DecoderLayer
from peagle.models.ends import Embedding
from peagle.models.spec import LayerSpec
from peagle.ops.cycle_state import FirstNorms
from peagle.ops.draft import Draft
from peagle.ops.linear import Linear
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.rope import rotation_at

Mix = Callable[[int, Attention, Tensor], Tensor]
"""(layer, its attention, its input [rows, hidden_size]) -> what it adds, [rows, hidden_size]."""


@dataclass(frozen=True)
class ConvSpec:
    """Sizes of DFlash 2's convolutions over the rows of a block."""

    taps: int
    """Rows that are mixed into one, its own included."""
    group: int
    """Channels that share what the row adds to their weights."""


@dataclass(frozen=True)
class BlockConfig(NetworkConfig):
    """The sizes of a DFlash head."""

    block_size: int
    """Rows of the blocks that it was trained for: the newest token's and K mask tokens'."""
    target_layers: int
    """How many layers the head's target has, which the head's files say, too."""
    embedding_scale: float = 1.0
    """The factor of embeddings."""
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    conv: ConvSpec | None = None
    """The sizes of DFlash 2's convolutions; None: this is DFlash."""

    kind = DFLASH

    @property
    def most_tokens(self) -> int:
        """As `NetworkConfig`: one for each mask token of a block."""
        return self.block_size - 1


def default_block_taps(layers: int, of_target: int) -> tuple[int, ...]:
    """The aux layers of a head of so many layers where nothing names them, as EAGLE counts them."""
    if layers == 1:
        return (of_target // 2 + 1,)
    step = (of_target - 4) / (layers - 1)
    return tuple(round(1 + index * step) + 1 for index in range(layers))


def block_depths(slots: Tensor) -> Tensor:
    """The places of rows in their blocks: [blocks * block rows, 1]. slots: [blocks, block rows]."""
    return torch.arange(slots.shape[1], device=slots.device).repeat(len(slots))[:, None]


class BlockConv(nn.Module):
    """Mixes the rows of a block with those before, on both sides of a sublayer.

    A row's weights are learned ones and what its own input adds to them.
    """

    def __init__(self, spec: ConvSpec, hidden_size: int) -> None:
        super().__init__()
        self.spec = spec
        self.base = nn.Parameter(torch.empty(2, spec.taps, hidden_size))
        """Learned weights for the input and for the output; tap 0 is the row itself."""
        self.projection = Linear(hidden_size, 2 * spec.taps * hidden_size // spec.group)

    def weights(self, x: Tensor) -> Tensor:
        """[rows, 2, taps, hidden_size], by a sublayer's normed input x [rows, hidden_size]."""
        added = self.projection(x).view(len(x), 2, self.spec.taps, -1)
        return self.base + added.repeat_interleave(self.spec.group, dim=-1)

    def mixed(self, x: Tensor, weights: Tensor, depths: Tensor) -> Tensor:
        """x: [rows, hidden_size]; weights: [rows, taps, hidden_size], of one side; depths: [rows,
        1] the places of rows in their blocks."""
        total = x * weights[:, 0]
        for tap in range(1, self.spec.taps):
            # what comes before a block is another one's
            before = x.roll(tap, 0).masked_fill(depths < tap, 0.0)
            total = total + before * weights[:, tap]
        return total


class BlockLayer(DecoderLayer):
    """A plain decoder layer for the rows of blocks."""

    def __init__(self, spec: LayerSpec, hidden_size: int, conv: ConvSpec | None) -> None:
        super().__init__(spec, hidden_size)
        self.attention_conv = None if conv is None else BlockConv(conv, hidden_size)
        self.mlp_conv = None if conv is None else BlockConv(conv, hidden_size)

    def forward(  # type: ignore[override]
        self, x: Tensor, depths: Tensor, index: int, mix: Mix
    ) -> Tensor:
        """The residual stream x [rows, hidden_size] after the layer, which is the `index`th.

        depths: as of `BlockConv.mixed`.
        """

        def attended(inputs: Tensor) -> Tensor:
            return mix(index, self.attention, inputs)

        x = x + _around(self.attention_conv, self.input_norm(x), depths, attended)
        return x + _around(self.mlp_conv, self.post_norm(x), depths, self.mlp)


def _around(
    conv: BlockConv | None, x: Tensor, depths: Tensor, sublayer: Callable[[Tensor], Tensor]
) -> Tensor:
    """A sublayer of a normed input x [rows, hidden_size], between convolutions if there are any."""
    if conv is None:
        return sublayer(x)
    weights = conv.weights(x)
    return conv.mixed(sublayer(conv.mixed(x, weights[:, 0], depths)), weights[:, 1], depths)


class BlockModel(Network):
    """A DFlash head with a directory of its own; embeddings and head are mostly the target's."""

    config: BlockConfig
    # the last known position, and the block's first row
    unread = 2

    def __init__(self, config: BlockConfig, max_length: int) -> None:
        super().__init__()
        shape, eps = config.transformer, config.transformer.norm.eps
        self.config = config
        self.embed = Embedding(shape.vocab_size, shape.hidden_size)
        self.fc = Linear(config.feature_size, shape.hidden_size)
        self.hidden_norm = RMSNorm(shape.hidden_size, eps)
        layers = (BlockLayer(each, shape.hidden_size, config.conv) for each in shape.layers)
        self.layers = nn.ModuleList(layers)
        self.readout = Readout(shape, config.draft_vocab_size, config.new_selector())
        self.readout.logit_scale, self.readout.softcap = config.logit_scale, config.logit_softcap
        self.register_buffer("rotations", config.rotations(max_length), persistent=False)

    @property
    def blocks(self) -> Sequence[Any]:
        """As `Network`."""
        return [*self.layers]

    def embedded(self, tokens: Tensor) -> Tensor:
        """What block rows begin with: [rows, hidden_size]."""
        return self.embed(tokens) * self.config.embedding_scale

    def first_norms(self) -> FirstNorms:
        """As `Network`: a mask token's row begins with its embedding, in a feature's place."""
        mask = self.config.mask_token_id
        assert mask is not None, "a block has mask tokens"
        return FirstNorms(
            embedding=self.embed.weight,
            input_weight=self.hidden_norm.weight,
            hidden_weight=self.hidden_norm.weight,
            eps=self.hidden_norm.eps,
            mask_token=mask,
            # rows of the block begin with embeddings where other networks have features
            mask_feature=self.embed.weight[mask] * self.config.embedding_scale,
        )

    def begin(self, x: Tensor, stream: Tensor) -> tuple[Tensor, Normed]:
        """As `Network`: the stream holds features and embeddings already."""
        return stream, Normed(stream, None, self.hidden_norm.eps)

    def project(self, features: Tensor) -> Tensor:
        """As `Network`."""
        return self.hidden_norm(self.fc(features))

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor, attend: Attend
    ) -> Tensor:
        """As `Network`, of known positions alone: their keys and values are all that is read."""
        rotation = rotation_at(self.rotations, positions)
        for index, layer in enumerate(self.blocks):
            # no row is asked for, so that attention stores keys and values and ends
            layer.attention(features, rotation, index, attend, positions[:0])
        return features

    def with_slots(
        self, rows: tuple[Tensor, Tensor, Tensor], attend: Attend, slots: Tensor
    ) -> Tensor:
        """As `Network`; what is returned for known positions means nothing."""
        tokens, features, positions = rows
        x = self.begun(features, tokens.index_select(0, slots[:, 0]), slots[:, 0])
        places, rotation = slots.flatten(), rotation_at(self.rotations, positions)

        def mix(index: int, attention: Attention, inputs: Tensor) -> Tensor:
            # known positions have the same features in every layer
            whole = features.index_copy(0, places, inputs)
            return attention(whole, rotation, index, attend, places)

        return x.index_copy(0, places, self.over(x[places], block_depths(slots), mix))

    def begun(self, features: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Features and mask slots, among which blocks begin at `places` with their tokens."""
        return features.index_copy(0, places, self.embedded(tokens).to(features.dtype))

    def over(self, x: Tensor, depths: Tensor, mix: Mix, call: LayerCall = call_plainly) -> Tensor:
        """The stream after the layers of blocks' rows x [rows, hidden_size]. depths: as of
        `BlockConv.mixed`."""
        for index, layer in enumerate(self.blocks):
            x = call(layer, x, depths, index, mix)
        return x


class DFlash(PEagle):
    """One pass over a block behind the newest token: P-EAGLE, whose slots stand one position
    before."""

    def propose(self, rows: ProposerRows) -> Draft:
        """Every slot's draft is corrected."""
        newest = rows.newest  # gathered once
        # the block's first row is the newest token's own, which drafts nothing
        output = rows.run(masks=rows.drafts + 1, first=newest)
        return self.drafted(rows, output, newest if self.model.readout.selector else None)

"""DFlash's training pass: blocks behind many anchors at once, in segments of whole blocks.

A block's rows see each other and the keys and values that each layer makes of the features up to
their anchor: one product a layer for all blocks of the batch. Blocks share nothing else, so that
segments of them give the gradient of one pass.

Of anchor a a block has the rows of depths 1 ... block_size, which stand at a + depth. That of depth
1 has the token after the anchor, the newest one; that of depth d + 2 drafts where P-EAGLE's element
(a, d) does, token a + d + 2, so that chains, loss and estimate are the same.
"""

import torch
from torch import Tensor

from peagle.drafters.dflash import BlockModel
from peagle.models.decoder import Attention
from peagle.ops.cached_attention import QKV, AttentionHeads
from peagle.ops.rope import rotation_at
from peagle.ops.rows import take
from peagle.train.cod import Chains, Elements
from peagle.train.context import Shared
from peagle.train.features import Features
from peagle.train.mask import rows_in_step
from peagle.train.packing import Batch
from peagle.train.partition import PartitionedPass, Pass, SegmentAttend
from peagle.transfer import to_device


class BlockPass(PartitionedPass[BlockModel]):
    """One batch through a DFlash head."""

    def __init__(
        self, model: BlockModel, batch: Batch, features: Features, chains: Chains, limit: int
    ) -> None:
        """limit: as of `PartitionedPass`, of rows of blocks."""
        super().__init__(model, batch, features, chains.blocks(model.config.block_size), limit)
        self._drawn = chains

    def _context(self) -> tuple[Pass, Shared]:
        """As `PartitionedPass`: keys and values, and nothing in the loss."""
        recorded: list[tuple[Tensor, Tensor]] = []

        def record(layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
            recorded.append((qkv.key, qkv.value))
            return qkv.query

        tokens, positions = to_device(self._device, self._batch.tokens, self._batch.positions)
        features = self._model.project(self._features.tapped)
        self._model(tokens, features, positions, record)
        keys, values = zip(*recorded, strict=True)
        none = Elements(self._chains.anchors[:0], self._chains.anchors[:0])
        return Pass(none, features[:0]), Shared([*keys], [*values], [])

    def _segment(self, elements: Elements, shared: Shared) -> Pass:
        """As `PartitionedPass`: whole blocks run, also past the end of a response."""
        model, batch, rows = self._model, self._batch, elements.padded(rows_in_step(self._device))
        drafted = elements.depths - 2
        kept = ((drafted >= 0) & (drafted < self._drawn.lengths[elements.anchors])).nonzero()[:, 0]
        starts = torch.arange(0, len(elements), model.config.block_size)
        inputs = batch.tokens[rows.anchors + 1], batch.positions[rows.anchors] + rows.depths
        places = rows.depths[:, None] - 1, starts, kept
        tokens, positions, depths, starts, there = to_device(self._device, *inputs, *places)
        masks = model.first_norms().mask_feature.expand(len(rows), -1)
        attend = SegmentAttend(rows, batch, shared, self._device)
        x = model.begun(masks, tokens[starts], starts)
        rotation = rotation_at(model.rotations, positions)

        def mix(index: int, attention: Attention, inputs: Tensor) -> Tensor:
            return attention(inputs, rotation, index, attend)

        hidden = model.over(x, depths, mix, self._call)
        return Pass(Elements(elements.anchors[kept], drafted[kept]), take(hidden, there))

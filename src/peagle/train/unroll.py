"""A drafter's training pass over packed rows: parallel in one forward, EAGLE-3 depth by depth."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafters.model import DraftModel
from peagle.train.cod import Elements, reaches, sample_elements
from peagle.train.conversations import PackedRows
from peagle.train.features import Features, RowAttend, fold
from peagle.train.mask import MaskedAttention


@dataclass(frozen=True)
class Pass:
    """Elements that went through the draft layers together, and what came out."""

    elements: Elements
    hidden: Tensor
    """[batch, elements, hidden_size] the residual stream."""


def parallel_pass(
    model: DraftModel,
    rows: PackedRows,
    features: Features,
    shares: list[float],
    generator: torch.Generator,
) -> Iterator[Pass]:
    """P-EAGLE: every kept (anchor, depth) at once; depth >= 1 stands for a mask slot."""
    elements = sample_elements(rows, shares, generator)
    batch, count = elements.anchors.shape
    real = elements.depths == 0
    following = next_tokens(rows, elements)
    mask_token = model.config.mask_token_id
    assert mask_token is not None
    tokens = torch.where(real, following, mask_token)
    projected = model.project(features.tapped)  # [batch, length, hidden_size]
    mask_feature = model.project(model.mask_hidden[None])
    filled = mask_feature.expand(batch, count - projected.shape[1], -1)
    inputs = torch.cat((projected, filled.to(projected.dtype)), dim=1)
    attend = RowAttend(MaskedAttention.build(elements, elements), batch)
    positions = positions_of(rows, elements)
    hidden = model(tokens.flatten(), inputs.flatten(0, 1), positions.flatten(), attend)
    yield Pass(elements, hidden.view(batch, count, -1))


def sequential_passes(
    model: DraftModel, rows: PackedRows, features: Features, depths: int
) -> Iterator[Pass]:
    """EAGLE-3's own unroll: depth d reads the true token d ahead and depth d - 1's output.

    Every anchor takes part at every depth; each depth attends to the keys of those before it.
    """
    generator = torch.Generator(rows.tokens.device)
    elements = sample_elements(rows, [1.0], generator)
    batch = elements.anchors.shape[0]
    seen: list[Elements] = []
    attend = GrowingAttend(batch)
    inputs = model.project(features.tapped).flatten(0, 1)
    for depth in range(depths):
        current = _at_depth(rows, elements, depth)
        seen.append(current)
        attend.widen(MaskedAttention.build(current, _joined(seen)))
        tokens = next_tokens(rows, current).flatten()
        hidden = model(tokens, inputs, positions_of(rows, current).flatten(), attend)
        inputs = model.feedback(hidden)
        yield Pass(current, hidden.view(batch, -1, hidden.shape[-1]))


class GrowingAttend:
    """Attention whose keys are those of this pass and of every pass before it, layer by layer."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._keys: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._attention: MaskedAttention | None = None

    def widen(self, attention: MaskedAttention) -> None:
        """Begin the next pass, under the rule over all keys so far and its own."""
        self._attention = attention

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Fold rows, add this pass's keys to the layer's, attend, unfold."""
        assert self._attention is not None
        folded = [fold(part, self._batch) for part in (query, key, value)]
        kept = self._keys.setdefault(layer, [])
        kept.append((folded[1], folded[2]))
        keys = torch.cat([pair[0] for pair in kept], dim=2)
        values = torch.cat([pair[1] for pair in kept], dim=2)
        return self._attention(folded[0], keys, values).transpose(1, 2).reshape(query.shape)


def next_tokens(rows: PackedRows, elements: Elements) -> Tensor:
    """The token after each element's position; the row's last position has none and repeats."""
    place = (elements.anchors + elements.depths + 1).clamp(max=rows.tokens.shape[1] - 1)
    return rows.tokens.gather(1, place)


def positions_of(rows: PackedRows, elements: Elements) -> Tensor:
    """Position within the document: the anchor's, plus the depth."""
    return rows.positions.gather(1, elements.anchors) + elements.depths


def _at_depth(rows: PackedRows, elements: Elements, depth: int) -> Elements:
    """The depth-0 elements moved `depth` tokens ahead; charged while that stays in the response."""
    if depth == 0:
        return elements
    depths = torch.full_like(elements.depths, depth)
    charged = elements.charged & reaches(rows, depth)
    return Elements(elements.anchors, depths, elements.documents, charged)


def _joined(parts: list[Elements]) -> Elements:
    names = ("anchors", "depths", "documents", "charged")
    return Elements(*(torch.cat([getattr(part, name) for part in parts], dim=1) for name in names))

"""What a drafter learns from: the target's hidden states over packed rows, computed in process."""

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.models.decoder import Decoder
from peagle.train.cod import Elements
from peagle.train.conversations import PackedRows
from peagle.train.mask import MaskedAttention


@dataclass(frozen=True)
class Features:
    """Hidden states of a batch of packed rows."""

    tapped: Tensor
    """[batch, length, feature_size] the residual streams that drafters read."""
    final: Tensor
    """[batch, length, hidden_size] what the target's head turns into logits."""


class RowAttend:
    """Attention of a decoder or drafter over [batch * elements] rows under one mask."""

    def __init__(self, attention: MaskedAttention, batch: int) -> None:
        self._attention, self._batch = attention, batch

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Fold rows into [batch, heads, elements, head_dim], attend, unfold."""
        folded = (fold(part, self._batch) for part in (query, key, value))
        return self._attention(*folded).transpose(1, 2).reshape(query.shape)


def fold(rows: Tensor, batch: int) -> Tensor:
    """[batch * elements, heads, head_dim] -> [batch, heads, elements, head_dim]."""
    return rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2)


@torch.no_grad()
def target_features(target: Decoder, rows: PackedRows, taps: tuple[int, ...]) -> Features:
    """Run the target once over packed rows; documents do not see each other."""
    batch, length = rows.tokens.shape
    index = torch.arange(length, device=rows.tokens.device).expand(batch, length)
    depth = torch.zeros_like(index)
    elements = Elements(index, depth, rows.documents, rows.charged)
    attend = RowAttend(MaskedAttention.build(elements, elements), batch)
    hidden, tapped = target(rows.tokens.view(-1), rows.positions.view(-1), attend, taps)
    assert tapped is not None
    return Features(tapped.view(batch, length, -1), hidden.view(batch, length, -1))

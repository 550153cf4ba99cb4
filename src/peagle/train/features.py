"""The target's hidden states over a batch, which a drafter learns from, computed in process."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from peagle.models.decoder import Decoder
from peagle.ops.cached_attention import QKV, AttentionHeads
from peagle.ops.delta_net import DeltaRows, DeltaState, DeltaWeights, recur
from peagle.train.attention import Masked, causal
from peagle.train.mask import Visibility, rows_in_step
from peagle.train.packing import Batch, Document, pack
from peagle.transfer import to_device

Split = Literal["training", "validation"]
Taps = tuple[int, ...]
"""Target layers whose streams are read."""


@dataclass(frozen=True)
class Features:
    """Hidden states of a batch."""

    tapped: Tensor
    """[length, feature_size]: the residual streams that drafters read."""
    final: Tensor
    """[length, hidden_size]: what the target's head turns into logits."""

    @property
    def finite(self) -> bool:
        """Whether none is NaN or infinite; waits for the device."""
        return bool(self.tapped.isfinite().all() and self.final.isfinite().all())


class FeatureSource(ABC):
    """Where the features of packed rows come from."""

    device: torch.device

    @abstractmethod
    def __call__(self, split: Split, rows: Tensor, batch: Batch) -> Features:
        """Features of some rows of a split; batch: those rows, end to end, possibly padded."""

    def unreadable(self, documents: Sequence[Document]) -> Document | None:
        """The first document whose hidden states are not finite, if any."""
        for document in documents:
            batch = pack([document], len(document.tokens)).batch(torch.arange(1))
            if not self("training", torch.arange(1), padded_for(self.device, batch)).finite:
                return document
        return None


class TargetFeatures(FeatureSource):
    """Features by our own decoder."""

    def __init__(self, target: Decoder, taps: Taps) -> None:
        self.device, self._target, self._taps = target.embed.weight.device, target, taps

    def __call__(self, split: Split, rows: Tensor, batch: Batch) -> Features:
        return target_features(self._target, batch, self._taps)


def documents_in(batch: Batch) -> list[slice]:
    """The places of a batch's documents, the longest first; one of one token is padding."""
    starts = batch.starts.unique().tolist()
    spans = [slice(*ends) for ends in zip(starts, [*starts[1:], len(batch)], strict=True)]
    spans.sort(key=lambda span: span.start - span.stop)
    return [span for span in spans if span.stop - span.start > 1] or spans[:1]


def placed(length: int, parts: Sequence[tuple[slice, Features]]) -> Features:
    """Features of documents at their places in a batch, zeros elsewhere."""
    like = parts[0][1]
    shapes = ((length, states.shape[-1]) for states in (like.tapped, like.final))
    whole = Features(*(like.final.new_zeros(shape) for shape in shapes))
    for span, states in parts:
        whole.tapped[span], whole.final[span] = states.tapped, states.final
    return whole


class DocumentAttend:
    """Attention of a batch's tokens in any layer, each to its own document up to itself."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        self._starts, self._alone, self._device = batch.starts, batch.one_document, device
        self._within: dict[int | None, Masked] = {}
        """Keyed by window."""

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """Rows of heads as the layers have them."""
        parts = [fold(part) for part in qkv]
        if self._alone and heads.window is None:
            return unfold(causal(*parts))
        return unfold(self.within(heads.window)(*parts)[0])

    def within(self, window: int | None) -> Masked:
        """The attention of layers with a window."""
        if window not in self._within:
            rows = torch.arange(len(self._starts))
            first = self._starts if window is None else self._starts.maximum(rows - window + 1)
            self._within[window] = Masked(Visibility(len(rows), first, rows), self._device)
        return self._within[window]


class TargetAttend(DocumentAttend):
    """The same for a target, whose layers may have sinks and a scale of their own."""

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """As `DocumentAttend`."""
        if heads.scale is not None:  # what follows scales by head_dim ** -0.5
            qkv = qkv._replace(query=qkv.query * (heads.scale * heads.head_dim**0.5))
        if heads.sinks is None:
            return super().__call__(layer, qkv, heads)
        drawn, log_sum = self.within(heads.window)(*map(fold, qkv))
        share = torch.sigmoid(log_sum - heads.sinks[:, None])  # what sinks leave
        return unfold(drawn * share[..., None].to(drawn.dtype))


class DocumentRecur:
    """The recurrences of a batch's tokens, each begun anew by its own document."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        firsts, counts = batch.starts.unique_consecutive(return_counts=True)
        nowhere = torch.zeros_like(firsts)
        spans = to_device(device, nowhere, nowhere, firsts, counts, counts, nowhere[:1])
        self._rows = DeltaRows._make((*spans, int(counts.max())))

    def __call__(self, layer: int, product: Tensor, gates: Tensor, weights: DeltaWeights) -> Tensor:
        """As `Recur`. What documents leave behind is in one place, which none of them reads."""
        empty = DeltaState.empty(weights.heads, 1, 0, product.dtype, product.device)
        return recur(product, gates, weights, empty, self._rows)


def padded_for(device: torch.device, batch: Batch) -> Batch:
    """The batch, padded to a length that attention on the device supports."""
    return batch.padded(rows_in_step(device))


def fold(rows: Tensor) -> Tensor:
    """[rows, heads, head_dim] -> [1, heads, rows, head_dim]."""
    return rows.transpose(0, 1)[None]


def unfold(heads: Tensor) -> Tensor:
    """[1, heads, rows, head_dim] -> [rows, heads, head_dim]."""
    return heads[0].transpose(0, 1)


@torch.no_grad()
def target_features(target: Decoder, batch: Batch, taps: Taps) -> Features:
    """Run the target once over a batch; documents do not see each other."""
    device = target.embed.weight.device
    tokens, positions = to_device(device, batch.tokens, batch.positions)
    attend, recur = TargetAttend(batch, device), DocumentRecur(batch, device)
    hidden, tapped = target(tokens, positions, attend, taps, recur)
    assert tapped is not None
    return Features(tapped, hidden)

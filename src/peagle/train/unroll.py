"""EAGLE-3's and MTP's training pass: depth by depth, each reading the previous one's output."""

from collections.abc import Iterator

import torch
from torch import Tensor

from peagle.drafters.network import Network
from peagle.ops.cached_attention import QKV, AttentionHeads
from peagle.train.attention import Weighed, merge
from peagle.train.cod import Elements, reaches
from peagle.train.features import DocumentAttend, Features, fold, unfold
from peagle.train.packing import Batch
from peagle.train.partition import Pass, PassLoss
from peagle.transfer import to_device


class SequentialPass:
    """One batch through such a drafter: its own unroll, all anchors at all depths."""

    def __init__(self, model: Network, batch: Batch, features: Features, depths: int) -> None:
        self._model, self._batch, self._features = model, batch, features
        self._depths = depths

    def passes(self) -> Iterator[Pass]:
        """Depth d reads the true token d ahead and depth d - 1's output."""
        device = self._features.tapped.device
        tokens, positions = to_device(device, self._batch.tokens, self._batch.positions)
        attend = UnrollAttend(self._batch, device)
        inputs = self._model.project(self._features.tapped)
        reach = reaches(self._batch)
        for depth in range(self._depths):
            # the last rows read the first tokens: anchors so late are in no loss
            following = tokens.roll(-depth - 1)
            hidden = self._model(following, inputs, positions + depth, attend)
            anchors = (reach > depth).nonzero().flatten()
            elements = Elements(anchors, torch.full_like(anchors, depth))
            yield Pass(elements, hidden[to_device(device, anchors)[0]])
            inputs = self._model.feedback(hidden)

    def backward(self, loss_of: PassLoss) -> Tensor:
        """Add the gradient of the summed losses to the parameters'; returns that sum."""
        total = torch.stack([loss_of(part) for part in self.passes()]).sum()
        total.backward()
        return total.detach()


class UnrollAttend(DocumentAttend):
    """An anchor sees the depth-0 keys of its document up to itself, and its own chain's keys."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        super().__init__(batch, device)
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """Rows of heads as the layers have them."""
        kept = self._kept.setdefault(layer, [])
        kept.append((qkv.key, qkv.value))
        depth = len(kept) - 1  # the row stands as many positions behind its anchor
        within = self.within(None if heads.window is None else heads.window - depth)
        context = within(fold(qkv.query), *map(fold, kept[0]))
        if len(kept) == 1:
            return unfold(context[0])
        return unfold(merge(context, _chain(qkv.query, kept[1:])))


def _chain(query: Tensor, kept: list[tuple[Tensor, Tensor]]) -> Weighed:
    """Attention of each row to its own chain: the keys that the same row had at lower depths."""
    keys, values = (torch.stack(parts, dim=2) for parts in zip(*kept, strict=True))
    rows, heads, head_dim = query.shape
    grouped = query.view(rows, keys.shape[1], -1, head_dim)
    scores = (grouped @ keys.mT).float() * head_dim**-0.5
    drawn = scores.softmax(dim=-1).to(query.dtype) @ values
    log_sum = scores.logsumexp(dim=-1).view(rows, heads)
    return fold(drawn.reshape(query.shape)), log_sum.mT[None]

"""What segments of deeper elements read from depth 0's pass, and the gradients they owe it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shared:
    """What depth 0's pass computes once for all segments."""

    keys: list[Tensor]
    """Each layer's: [length, kv_heads, head_dim]."""
    values: list[Tensor]
    slot: list[Tensor]
    """What is learned of a mask slot's input, [1, hidden_size] each: P-EAGLE's embedding and
    feature, which is `mask_hidden` after `fc`."""

    @property
    def tensors(self) -> list[Tensor]:
        """All keys, all values, then a mask slot's."""
        return [*self.keys, *self.values, *self.slot]

    def rows(self, layer: int, which: slice) -> tuple[Tensor, Tensor]:
        """A layer's keys and values of some tokens."""
        return self.keys[layer][which], self.values[layer][which]


@dataclass(frozen=True)
class Borrowed(Shared):
    """The same, detached from depth 0's graph: segments leave their gradients in `owed`."""

    owed: list[Tensor]
    """Gradients of each of `tensors`, summed in float32."""

    @classmethod
    def of(cls, shared: Shared) -> "Borrowed":
        """A detached copy to which nothing is owed yet."""
        owed = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in shared.tensors]
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in shared.tensors]
        layers, last = len(shared.keys), 2 * len(shared.keys)
        rest = zip(leaves[last:], owed[last:], strict=True)
        slot = [_Read.apply(leaf, sums, slice(None)) for leaf, sums in rest]
        return cls(leaves[:layers], leaves[layers:last], slot, owed)

    def gradients(self, shared: Shared) -> tuple[list[Tensor], list[Tensor]]:
        """The tensors of `shared` that need gradients, and those owed to them, in their dtype."""
        pairs = zip(shared.tensors, self.owed, strict=True)
        learnt = [(tensor, owed.to(tensor.dtype)) for tensor, owed in pairs if tensor.requires_grad]
        return [tensor for tensor, _ in learnt], [owed for _, owed in learnt]

    def rows(self, layer: int, which: slice) -> tuple[Tensor, Tensor]:
        """As `Shared`."""
        keys = _Read.apply(self.keys[layer], self.owed[layer], which)
        values = _Read.apply(self.values[layer], self.owed[len(self.keys) + layer], which)
        return keys, values


class _Read(torch.autograd.Function):
    """Rows whose gradient goes straight to a float32 sum.

    Torch's own gradient would be as large as the whole tensor that they are part of.
    """

    @staticmethod
    def forward(ctx: Any, source: Tensor, owed: Tensor, which: slice) -> Tensor:
        ctx.owed = owed[which]
        return source[which]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.owed += gradient
        return None, None, None

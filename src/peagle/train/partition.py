"""Training passes in segments, and P-EAGLE's: depth 0 once, the gradient exact.

The paper's Algorithm 1 runs the depth-0 elements before a segment again for every segment. Since
they attend only to each other, here they run once: each segment attends to their keys and values,
the gradients on those are collected, and depth 0 is backpropagated last.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from peagle.drafters.model import DraftModel, LayerCall, call_plainly
from peagle.drafters.network import Network
from peagle.ops.cached_attention import QKV, AttentionHeads
from peagle.train.attention import Masked, add_dense
from peagle.train.cod import Chains, Elements
from peagle.train.context import Borrowed, Shared
from peagle.train.features import DocumentAttend, Features, fold, unfold
from peagle.train.lookup import lookup
from peagle.train.mask import BLOCK, Visibility, rows_in_step
from peagle.train.packing import Batch
from peagle.transfer import to_device

TILE = 2048
"""Number of elements that share a dense part of the context."""
DENSE_ROWS, DENSE_KEYS = 128, 128
"""A dense part's sizes are multiples of these."""
DENSE_PAIRS = 2**20
"""Query-key pairs below which a dense part's calls cost more than it saves."""
VARIANTS = 64
"""Compiled variants allowed for one function."""
N = TypeVar("N", bound=Network)
PassLoss = Callable[["Pass"], Tensor]
"""The loss of a pass."""


@dataclass(frozen=True)
class Pass:
    """Elements in the loss that went through the draft layers together, and their output."""

    elements: Elements
    hidden: Tensor
    """[elements, hidden_size]: the residual stream."""

    def joined(self, other: "Pass") -> "Pass":
        """The pass of these elements and, behind them, of the other's."""
        one, two = self.elements, other.elements
        anchors = torch.cat((one.anchors, two.anchors))
        depths = torch.cat((one.depths, two.depths))
        return Pass(Elements(anchors, depths), torch.cat((self.hidden, other.hidden)))


class PartitionedPass(ABC, Generic[N]):
    """One batch through a network whose deeper elements share what depth 0 leaves."""

    def __init__(
        self,
        model: N,
        batch: Batch,
        features: Features,
        chains: Chains,
        limit: int,
        recompute: bool = False,
    ) -> None:
        """limit: about how many deeper elements run together; recompute: keep only the layers'
        inputs at depth 0, and run each layer again for its gradient. Both bound memory, neither
        changes a result.
        """
        self._model, self._batch, self._features = model, batch, features
        self._chains, self._limit = chains, limit
        self._device = features.tapped.device
        self._call = compiled() if self._device.type == "cuda" else call_plainly
        recomputed = partial(checkpoint, self._call, use_reentrant=False)
        self._first_call: LayerCall = recomputed if recompute else self._call

    def passes(self) -> Iterator[Pass]:
        """Passes of whole chains, in one graph: the plain twin of `backward`."""
        first, shared = self._context()
        for rows, elements in self._shares(first.elements):
            part = Pass(first.elements[rows], first.hidden[rows])
            yield part.joined(self._segment(elements, shared)) if len(elements) else part

    def backward(self, loss_of: PassLoss) -> Tensor:
        """Add the gradient of the summed losses to the parameters'; returns that sum.

        Never holds more than depth 0 and one segment.
        """
        first, shared = self._context()
        stream, borrowed = first.hidden.detach(), Borrowed.of(shared)
        losses, leaves = [], []
        for rows, elements in self._shares(first.elements):
            # a leaf, so that a segment's gradient stops here and depth 0 is walked through once, at
            # the end
            leaves.append(stream[rows].requires_grad_())
            part = Pass(first.elements[rows], leaves[-1])
            if len(elements):
                part = part.joined(self._segment(elements, borrowed))
            losses.append(loss_of(part))
            losses[-1].backward()
            losses[-1] = losses[-1].detach()  # frees the segment
        learnt, gradients = borrowed.gradients(shared)
        of_leaves = [leaf.grad for leaf in leaves if leaf.grad is not None]
        assert len(of_leaves) == len(leaves), "a pass without a gradient"
        of_stream = torch.cat(of_leaves)
        # depth 0's backward pass takes the most memory
        del leaves, of_leaves
        torch.autograd.backward([first.hidden, *learnt], [of_stream, *gradients])
        return torch.stack(losses).sum()

    def _shares(self, first: Elements) -> Iterator[tuple[slice, Elements]]:
        """Segments, each with the depth-0 elements at its anchors: most predict the same tokens."""
        cut = self._chains.segments(self._limit, rows_in_step(self._device))
        segments = list(cut) or [self._chains.deeper()]
        stops = [*(int(s.anchors[-1]) + 1 for s in segments[:-1]), len(self._batch)]
        bounds = [0, *torch.searchsorted(first.anchors, torch.tensor(stops)).tolist()]
        yield from zip(map(slice, bounds[:-1], bounds[1:]), segments, strict=True)

    @abstractmethod
    def _context(self) -> tuple[Pass, Shared]:
        """Run depth 0 at every token; returns its elements in the loss, and what segments read of
        it."""

    @abstractmethod
    def _segment(self, elements: Elements, shared: Shared) -> Pass:
        """Run the elements of a segment; returns those that are in the loss."""


class ParallelPass(PartitionedPass[DraftModel]):
    """One batch through a P-EAGLE drafter."""

    def _context(self) -> tuple[Pass, Shared]:
        model, batch = self._model, self._batch
        anchors = self._chains.anchors
        features = model.project(self._features.tapped)
        mask_feature = model.mask_feature()
        # slot p reads token p + 1; the mask token comes last, and is looked up with them
        tokens = torch.cat((batch.tokens.roll(-1), torch.tensor([model.config.mask_token_id])))
        embeddings = lookup(model.embed.weight, tokens).to(features.dtype)
        positions, places = to_device(self._device, batch.positions, anchors)
        attend = ContextAttend(batch, self._device)
        hidden = model.layers(
            embeddings[:-1], features, positions, attend, self._first_call, places
        )
        first = Pass(Elements(anchors, torch.zeros_like(anchors)), hidden)
        keys, values = zip(*attend.recorded, strict=True)
        return first, Shared(list(keys), list(values), [embeddings[-1:], mask_feature])

    def _segment(self, elements: Elements, shared: Shared) -> Pass:
        """As `PartitionedPass`; mask slots differ only by their positions."""
        rows = elements.padded(rows_in_step(self._device))
        (positions,) = to_device(self._device, self._batch.positions[rows.anchors] + rows.depths)
        attend = SegmentAttend(rows, self._batch, shared, self._device)
        embedding, feature = shared.slot
        hidden = self._model.layers(embedding, feature, positions, attend, self._call)
        return Pass(elements, hidden[: len(elements)])


class ContextAttend(DocumentAttend):
    """Attention at depth 0, which records each layer's keys and values."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        super().__init__(batch, device)
        self.recorded: list[tuple[Tensor, Tensor]] = []

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """As `DocumentAttend`; a recomputed layer calls it a second time."""
        if layer == len(self.recorded):
            self.recorded.append((qkv.key, qkv.value))
        return super().__call__(layer, qkv, heads)


@dataclass(frozen=True)
class Dense:
    """Elements and context tokens such that each element sees all of the tokens."""

    queries: slice
    keys: slice


@dataclass(frozen=True)
class Reach:
    """What the elements of a segment see, split into dense parts and the rest.

    All elements of a tile see the context from their document's start to near the tile's first
    anchor. Sizes come in steps, since kernels are planned again for each new size.
    """

    dense: list[Dense]
    near: slice
    """Range of context keys that contains everything else."""
    visibility: Visibility
    """The rest: the near context, then the segment's own elements."""

    @classmethod
    def of(
        cls, elements: Elements, batch: Batch, window: int | None = None, causal: bool = True
    ) -> "Reach":
        """Split what some elements see.

        window: positions of the context that end at an element's own; whatever it is, the element
        sees its own chain up to itself, or if not causal all of it.
        """
        # what the elements of a tile see, with anchors a to b:
        #
        #                 document's start              a       b         own keys
        #   (a, 1)        ████████ dense ███████│▓▓▓▓▓▓▓▓                 ▓
        #   (a, 2)        ██████████████████████│▓▓▓▓▓▓▓▓                 ▓▓
        #   (b, 1)        ██████████████████████│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓           ▓
        #                 one call for all of it  the rest, by intervals
        first = batch.starts[elements.anchors]
        if window is None:
            dense = list(_tiles(elements.anchors, first))
        else:
            dense = []
            first = first.maximum(elements.anchors + elements.depths - window + 1)
        for part in dense:
            # what the dense part has seen must not be seen twice
            first[part.queries].fill_(part.keys.stop)
        end = int(elements.anchors[-1]) + 1
        near = slice(int(first.min()) // BLOCK * BLOCK, min(-(-end // BLOCK) * BLOCK, len(batch)))
        last, until = elements.anchors - near.start, torch.arange(len(elements))
        own = until - elements.depths + 1
        if not causal:
            found = own.unique_consecutive(return_inverse=True, return_counts=True)
            until = own + found[2][found[1]] - 1
        sizes = near.stop - near.start, first - near.start, last
        return cls(dense, near, Visibility(*sizes, (own, until)))


def _tiles(anchors: Tensor, starts: Tensor) -> Iterator[Dense]:
    """Dense parts of some elements, given their anchors and their documents' starts."""
    tiles, firsts, documents = range(0, len(anchors), TILE), anchors[::TILE], starts[::TILE]
    for tile, anchor, start in zip(tiles, firsts.tolist(), documents.tolist(), strict=True):
        sharing = int(np.searchsorted(starts.numpy(), start, side="right")) - tile
        count = min(sharing, TILE) // DENSE_ROWS * DENSE_ROWS
        # the tile's first anchor is its lowest: all of the tile sees what comes before
        width = (anchor - start) // DENSE_KEYS * DENSE_KEYS
        if count * width >= DENSE_PAIRS:
            yield Dense(slice(tile, tile + count), slice(start, start + width))


class SegmentAttend:
    """Attention of a segment's elements in any layer, to the context and to their own chains."""

    def __init__(
        self, elements: Elements, batch: Batch, shared: Shared, device: torch.device
    ) -> None:
        self._elements, self._batch = elements, batch
        self._shared, self._device = shared, device
        self._within: dict[tuple[int | None, bool], tuple[Reach, Masked]] = {}
        """Keyed by window and causality."""

    def __call__(self, layer: int, qkv: QKV, heads: AttentionHeads) -> Tensor:
        """Rows of heads as the layers have them."""
        seen = heads.window, heads.causal
        if seen not in self._within:
            reach = Reach.of(self._elements, self._batch, *seen)
            self._within[seen] = reach, Masked(reach.visibility, self._device)
        reach, masked = self._within[seen]
        # the first layer's input is the same for all mask slots: one value, and keys that differ by
        # rotation
        own, folded = (qkv.key, qkv.value.expand_as(qkv.key)), fold(qkv.query)
        near = self._shared.rows(layer, reach.near)
        together = (torch.cat(parts) for parts in zip(near, own, strict=True))
        rest = masked(folded, *map(fold, together))
        if not reach.dense:
            return unfold(rest[0])
        read = (self._shared.rows(layer, part.keys) for part in reach.dense)
        context = [(fold(keys), fold(values)) for keys, values in read]
        return unfold(add_dense(folded, rest, [part.queries for part in reach.dense], context))


@cache
def compiled(backend: str = "inductor") -> LayerCall:
    """Calls layers with their elementwise work fused, and attention unchanged.

    First, middle and last layers, at depth 0 and deeper, with and without gradients: more variants
    than the compiler makes by default before it gives up. Whoever runs without a GPU does not wait
    for the compiler's import, 1.6 s, so that attention is kept from it here.
    """
    for attend in (ContextAttend, SegmentAttend):
        attend.__call__ = torch.compiler.disable(attend.__call__)  # type: ignore[method-assign]
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    return torch.compile(call_plainly, dynamic=True, backend=backend)

"""A decoder's layers in few launches: the fast twin of `Decoder.forward`, same weights."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from peagle.models.decoder import MLP, Attention, Decoder, DecoderConfig
from peagle.ops import residual
from peagle.ops.cached_attention import Heads
from peagle.ops.moe import Experts
from peagle.ops.norm import RMSNorm
from peagle.ops.residual import Normed

AttendProduct = Callable[[int, Tensor, Heads], Tensor]
"""(layer, its q, k, v product [rows, width], how to read it) -> [rows, heads * head_dim]."""


class Block(Protocol):
    """What a layer is made of, a target's or a drafter's."""

    input_norm: RMSNorm
    attention: Attention
    post_norm: RMSNorm
    mlp: MLP | Experts


@dataclass(frozen=True)
class Taps:
    """Which streams a pass keeps."""

    layers: tuple[int, ...]
    """Tap i is the stream after i layers, ascending."""
    into: Tensor
    """[rows, len(layers) * hidden_size]"""

    def keep(self, layer: int, stream: Tensor) -> None:
        """Copy a stream if it is wanted."""
        if layer in self.layers:
            width = stream.shape[1]
            place = self.layers.index(layer) * width
            self.into[:, place : place + width].copy_(stream)


class FusedLayers:
    """Layers of a target or a drafter, each a chain of products that carry their norms along."""

    def __init__(
        self, layers: Iterable[Any], last_norm: RMSNorm, config: DecoderConfig, table: Tensor
    ) -> None:
        self.layers: list[Block] = list(layers)
        self.heads = [heads_of(layer, config, table) for layer in self.layers]
        self._next_norms = [*(layer.input_norm for layer in self.layers[1:]), last_norm]

    def __call__(
        self,
        stream: Tensor,
        first: Normed,
        attend: AttendProduct,
        taps: Taps | None = None,
        reads: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        """The residual stream [rows, hidden_size] behind the last layer, and its final norm.

        `first` is what the first layer's q, k, v product reads; `reads` the rows that are wanted,
        None for all: the others end at the last layer's keys and values.
        """
        if taps is not None:
            taps.keep(0, stream)
        x = first
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            kept = reads if index == last else None
            stream, x = self._layer(index, layer, stream, x, attend, kept)
            if taps is not None:
                taps.keep(index + 1, stream)
        return stream, x

    def write_keys(self, stream: Tensor, first: Normed, attend: AttendProduct) -> None:
        """The same as far as keys and values: all that rows nobody reads are needed for."""
        x = first
        for index, layer in enumerate(self.layers[:-1]):
            stream, x = self._layer(index, layer, stream, x, attend)
        last = len(self.layers) - 1
        attend(last, residual.linear(x, self.layers[last].attention.qkv), self.heads[last])

    def _layer(
        self,
        index: int,
        layer: Block,
        stream: Tensor,
        x: Normed,
        attend: AttendProduct,
        reads: Tensor | None = None,
    ) -> tuple[Tensor, Normed]:
        qkv = residual.linear(x, layer.attention.qkv)
        attended = attend(index, qkv, self.heads[index])
        if reads is not None:
            attended, stream = attended.index_select(0, reads), stream.index_select(0, reads)
        stream, x = residual.add(attended, layer.attention.out, stream, layer.post_norm)
        if isinstance(layer.mlp, Experts):
            stream = stream + layer.mlp(residual.normed(stream, layer.post_norm).x)
            return stream, residual.normed(stream, self._next_norms[index])
        inner = residual.gated(x, layer.mlp.gate_up)
        return residual.add(inner, layer.mlp.down, stream, self._next_norms[index])


def heads_of(layer: Block, config: DecoderConfig, table: Tensor) -> Heads:
    """How a layer's q, k, v product is read. table: of `rope_table`."""
    norm = layer.attention.qk_norm
    return Heads(
        **vars(layer.attention.focus),
        rotations=table,
        norm_weight=None if norm is None else norm.weight,
        eps=config.rms_norm_eps,
    )


def fused_target(decoder: Decoder) -> FusedLayers:
    """The layers of a target."""
    return FusedLayers(decoder.layers, decoder.norm, decoder.config, decoder.rotations)

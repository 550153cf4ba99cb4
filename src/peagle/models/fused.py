"""A decoder's layers in few launches: the fast twin of `Decoder.forward`, same weights."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from peagle.models.decoder import (
    MLP,
    Attention,
    Decoder,
    DeltaNet,
    MixtureLayer,
    Recur,
    SandwichLayer,
    SharedExperts,
)
from peagle.ops import residual, sandwich
from peagle.ops.cached_attention import QKVSpec
from peagle.ops.linear import Linear
from peagle.ops.moe import Experts
from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.residual import Beside, BlockWeights

AttendProduct = Callable[[int, Tensor, QKVSpec], Tensor]
"""(layer, its q, k, v product [rows, width], how to read it) -> [rows, heads * head_dim]."""


class Block(Protocol):
    """The parts of a layer, of a target or a drafter."""

    input_norm: RMSNorm
    mixer: Attention | DeltaNet
    post_norm: RMSNorm
    mlp: MLP | Experts | SharedExperts


@dataclass(frozen=True)
class Taps:
    """The residual streams that a pass keeps."""

    layers: tuple[int, ...]
    """Ascending; tap i is the stream after i layers."""
    into: Tensor
    """[rows, len(layers) * hidden_size]"""
    multiplier: float = 1.0
    """The target's `residual_multiplier`."""

    def keep(self, layer: int, stream: Tensor) -> None:
        """Copy the stream after `layer` layers if it is tapped."""
        if layer in self.layers:
            width = stream.shape[1]
            place = self.layers.index(layer) * width
            own = self.into[:, place : place + width]
            own.copy_(stream if self.multiplier == 1 else stream * self.multiplier)


class FusedLayers:
    """Layers of a target or a drafter, each a chain of products with their norms fused in."""

    def __init__(
        self,
        layers: Iterable[Any],
        last_norm: RMSNorm,
        tables: Mapping[int, tuple[Tensor, Tensor | None]],
    ) -> None:
        """tables: of `rope_table` and of `query_scales`, by the layers that attend."""
        self.layers: list[Block] = list(layers)
        self.specs = {i: qkv_spec(self.layers[i], table) for i, table in tables.items()}
        self._next_norms = [*(layer.input_norm for layer in self.layers[1:]), last_norm]
        self._inputs: list[Linear] = [_input(layer.mixer) for layer in self.layers]

    def __call__(
        self,
        stream: Tensor,
        first: Normed,
        attend: AttendProduct,
        taps: Taps | None = None,
        reads: Tensor | None = None,
        recur: Recur | None = None,
    ) -> tuple[Tensor, Normed]:
        """The residual stream [rows, hidden_size] after the last layer, and its final norm.

        `first` is the input of the first layer's first product. `reads` are the rows to return,
        None for all: the others stop at the last layer's keys and values, so that no tap may come
        after it. With empty `reads` both results are empty.
        """
        assert reads is None or taps is None or taps.layers[-1] < len(self.layers)
        if taps is not None:
            taps.keep(0, stream)
        x = first
        product: Tensor | None = residual.linear(first, self._inputs[0])
        for index in range(len(self.layers)):
            assert product is not None
            attended = self._mixed(index, product, x, attend, recur)
            if reads is not None and index == len(self.layers) - 1:
                attended, stream = attended.index_select(0, reads), stream.index_select(0, reads)
                if not len(reads):
                    return stream, Normed(stream, None, first.eps)
            stream, x, product = self._after_mixer(index, attended, stream)
            if taps is not None:
                taps.keep(index + 1, stream)
        return stream, x

    def _mixed(
        self, index: int, product: Tensor, x: Normed, attend: AttendProduct, recur: Recur | None
    ) -> Tensor:
        """What a layer's mixer gives before its last product. product: its first one, of x."""
        mixer = self.layers[index].mixer
        if isinstance(mixer, DeltaNet):
            assert recur is not None, "a pass over recurrent layers brings their states"
            return recur(index, product, residual.linear(x, mixer.gates), mixer.weights)
        spec = self.specs[index]
        if not mixer.spec.gated:
            return attend(index, product, spec)
        width = mixer.spec.width
        attended = attend(index, product[:, :-width], spec)
        return attended * product[:, -width:].sigmoid()

    def _after_mixer(
        self, index: int, attended: Tensor, stream: Tensor
    ) -> tuple[Tensor, Normed, Tensor | None]:
        """The rest of a layer after its mixer, and the next layer's first product."""
        layer, norm = self.layers[index], self._next_norms[index]
        following = self._inputs[index + 1] if index + 1 < len(self.layers) else None
        out, mlp = layer.mixer.out, layer.mlp
        if isinstance(layer, SandwichLayer):
            stream, x = _after_sandwich(layer, attended, stream, norm)
            return stream, x, None if following is None else residual.linear(x, following)
        if isinstance(mlp, MLP):
            weights = out, layer.post_norm, mlp.gate_up, mlp.down
            block = BlockWeights(*weights, norm, following, mlp.gate)
            return residual.layer_chain(attended, stream, block)
        stream, x = residual.add(attended, out, stream, layer.post_norm)
        if isinstance(mlp, SharedExperts):
            beside = Beside(_through(mlp.shared, x), mlp.shared_gate, x)
            stream, x = residual.add_mixture(x, mlp.experts, stream, norm, beside)
        else:
            stream, x = residual.add_mixture(x, mlp, stream, norm)
        return stream, x, None if following is None else residual.linear(x, following)


def _input(mixer: Attention | DeltaNet) -> Linear:
    """A mixer's first product."""
    return mixer.qkv if isinstance(mixer, Attention) else mixer.qkvz


def _after_sandwich(
    layer: SandwichLayer, attended: Tensor, stream: Tensor, norm: RMSNorm
) -> tuple[Tensor, Normed]:
    """The stream after a layer that norms what it adds, and the same under the next norm.

    attended: [rows, heads * head_dim].
    """
    product = residual.linear(Normed(attended, None, norm.eps), layer.mixer.out)
    given = product, layer.attention_norm, stream, layer.post_norm
    if isinstance(layer, MixtureLayer):
        mixture = layer.mixture()
        stream, inputs = sandwich.add_before_mixture(*given, mixture)
        dense = _through(layer.mlp, inputs.dense)
        return sandwich.add_mixture(dense, inputs, mixture, stream, norm)
    stream, x = sandwich.add(*given)
    return sandwich.add(_through(layer.mlp, x), layer.mlp_norm, stream, norm, layer.scalar)


def _through(mlp: MLP | Experts | SharedExperts, x: Normed) -> Tensor:
    """What an MLP makes of rows: [rows, hidden_size]."""
    assert isinstance(mlp, MLP)
    inner = residual.gated(x, mlp.gate_up, mlp.gate)
    return residual.linear(Normed(inner, None, x.eps), mlp.down)


def qkv_spec(layer: Block, tables: tuple[Tensor, Tensor | None]) -> QKVSpec:
    """How a layer's q, k, v product is read. tables: of `rope_table` and of `query_scales`."""
    attention = layer.mixer
    assert isinstance(attention, Attention)
    norm = attention.qk_norm
    return QKVSpec(
        **vars(attention.heads),
        rotations=tables[0],
        query_scales=tables[1],
        norm_weight=None if norm is None else norm.weight,
        eps=layer.input_norm.eps,
        v_norm=attention.spec.v_norm,
    )


def fused_target(decoder: Decoder) -> FusedLayers:
    """The layers of a target."""
    return FusedLayers(decoder.layers, decoder.norm, decoder.rope.of_layers())

"""The four products of a decoder layer, each with the norm, gate or addition around it.

The residual stream passes between them in two forms: itself, and times the next norm's weight. What
the second still lacks, one over its root mean square, is a number per row, so it is applied to the
product that follows: with few rows, no separate pass over the stream is left.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.linear import Linear
from peagle.ops.moe import Experts
from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.swiglu import swiglu
from peagle.ops.triton import has_kernels, kernels, on_hopper


@dataclass(frozen=True)
class Normed:
    """The input of a product: a stream times its norm's weight."""

    x: Tensor
    """[rows, width]"""
    squares: Tensor | None
    """[parts, rows] sums of squares of the stream; None where x is divided by its rms already."""
    eps: float

    def scale(self) -> Tensor:
        """What x still has to be multiplied by: [rows, 1] in float32."""
        if self.squares is None:
            return torch.ones(len(self.x), 1, device=self.x.device)
        mean = self.squares.sum(dim=0)[: len(self.x), None] / self.x.shape[1]
        return torch.rsqrt(mean + self.eps)


@dataclass(frozen=True)
class Links:
    """The products and norms between a layer's attention and the next one's."""

    out: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    next_norm: RMSNorm
    qkv: Linear | None
    """The next layer's; None after the last."""


def chain(
    attended: Tensor, stream: Tensor, links: Links, live: Tensor | None = None
) -> tuple[Tensor, Normed, Tensor | None]:
    """From attended values to the stream after their layer, its next norm, and q, k, v of that.

    attended: [rows, heads * head_dim]; stream: [rows, hidden_size]; live: as in `gated`.
    """
    if on_hopper(attended) and kernels("chain").takes(attended, links):
        fast: tuple[Tensor, Normed, Tensor | None] = kernels("chain").chain(attended, stream, links)
        return fast
    stream, x = add(attended, links.out, stream, links.post_norm)
    stream, x = add(gated(x, links.gate_up, live), links.down, stream, links.next_norm)
    return stream, x, None if links.qkv is None else linear(x, links.qkv)


def normed(x: Tensor, norm: RMSNorm) -> Normed:
    """`norm` of a stream. x: [rows, width]."""
    if has_kernels(x):
        return Normed(kernels("residual").rms_norm(x, norm.weight, norm.eps), None, norm.eps)
    return Normed(rms_norm(x, norm.weight, norm.eps), None, norm.eps)


def linear(x: Normed, layer: Linear) -> Tensor:
    """`x @ weight.T + bias`: [rows, out_features]."""
    if has_kernels(x.x) and kernels("tiles").takes(x.x, len(layer.weight)):
        return kernels("residual").linear(x.x, x.squares, x.eps, layer.weight, layer.bias)
    return _product(x, layer)


def gated(x: Normed, gate_up: Linear, live: Tensor | None = None) -> Tensor:
    """SwiGLU's inner product: silu(gate) * up, [rows, out_features / 2].

    live: [1] int32, the number of rows, from the first on, whose results are read; None: all.
    """
    if has_kernels(x.x) and gate_up.bias is None:
        if kernels("tiles").takes(x.x, len(gate_up.weight) // 2, gated=True):
            return kernels("residual").gated(x.x, x.squares, x.eps, gate_up.weight)
        if (
            x.squares is None
            and on_hopper(x.x)
            and kernels("wide_gate").takes(x.x, gate_up.weight, live)
        ):
            return kernels("wide_gate").gated(x.x, gate_up.weight, live)
        return kernels("swiglu").swiglu(_product(x, gate_up))
    return swiglu(_product(x, gate_up))


def add(x: Tensor, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
    """`stream + layer(x)`, and the same under the next norm. stream: [rows, hidden_size]."""
    if has_kernels(x):
        return _add_fast(x, layer, stream, norm)
    total = stream + F.linear(x, layer.weight, layer.bias)
    return total, normed(total, norm)


def add_mixture(
    x: Normed, experts: Experts, stream: Tensor, norm: RMSNorm
) -> tuple[Tensor, Normed]:
    """`stream + experts(x)`, and the same under the next norm. stream: [rows, hidden_size]."""
    if has_kernels(x.x):
        form = experts.form()
        total, out = kernels("moe").add(x, stream, norm.weight, norm.eps, *form)
        return total, Normed(out, None, norm.eps)
    total = stream + experts(x.x)
    return total, normed(total, norm)


def _add_fast(x: Tensor, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
    fast = kernels("residual")
    if kernels("tiles").takes(x, len(layer.weight)):
        total, scaled, squares = fast.add(x, layer.weight, layer.bias, stream, norm.weight)
        return total, Normed(scaled, squares, norm.eps)
    product = F.linear(x, layer.weight, layer.bias)
    total, scaled = fast.add_rms_norm(stream, product, norm.weight, norm.eps)
    return total, Normed(scaled, None, norm.eps)


def _product(x: Normed, layer: Linear) -> Tensor:
    if x.squares is None:
        return F.linear(x.x, layer.weight, layer.bias)
    product = F.linear(x.x, layer.weight)
    product = (product * x.scale()).to(product.dtype)
    return product if layer.bias is None else product + layer.bias

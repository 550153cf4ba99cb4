"""The products of a decoder layer, each with the norm, gate or addition around it.

The residual stream passes between them in two forms: itself, and times the next norm's weight. What
the second still lacks, one over its root mean square, is a number per row, so it is applied to the
product that follows: with few rows, no separate pass over the stream is left.
"""

from dataclasses import dataclass

from torch import Tensor

from peagle.ops.linear import Linear
from peagle.ops.moe import EXPERTS, Experts
from peagle.ops.norm import RMSNorm, rms_norm
from peagle.ops.products.choice import choose
from peagle.ops.products.normed import Normed
from peagle.ops.products.product import Epilogue
from peagle.ops.triton import in_kernels


@dataclass(frozen=True)
class BlockWeights:
    """The products and norms between a layer's attention and the next one's."""

    out: Linear
    post_norm: RMSNorm
    gate_up: Linear
    down: Linear
    next_norm: RMSNorm
    qkv: Linear | None
    """The next layer's; None after the last."""
    gate: Epilogue = Epilogue.GATE


@in_kernels(
    "layer_chain", lambda fast, attended, _, block: fast.takes(attended, block), hopper=True
)
def layer_chain(
    attended: Tensor, stream: Tensor, block: BlockWeights
) -> tuple[Tensor, Normed, Tensor | None]:
    """From attended values to the stream after their layer, its next norm, and q, k, v of that.

    attended: [rows, heads * head_dim]; stream: [rows, hidden_size].
    """
    stream, x = add(attended, block.out, stream, block.post_norm)
    stream, x = add(gated(x, block.gate_up, block.gate), block.down, stream, block.next_norm)
    return stream, x, None if block.qkv is None else linear(x, block.qkv)


@in_kernels("norm")
def normed(x: Tensor, norm: RMSNorm) -> Normed:
    """`norm` of a stream. x: [rows, width]."""
    return Normed(rms_norm(x, norm.weight, norm.eps), None, norm.eps)


def linear(x: Normed, layer: Linear) -> Tensor:
    """`x @ weight.T + bias`: [rows, out_features]."""
    return choose(x, layer, Epilogue.NONE).linear(x, layer)


def gated(x: Normed, gate_up: Linear, gate: Epilogue) -> Tensor:
    """A gated MLP's inner product: silu(gate) * up, or gelu's, [rows, out_features / 2]."""
    return choose(x, gate_up, gate).gated(x, gate_up, gate)


def add(x: Tensor, layer: Linear, stream: Tensor, norm: RMSNorm) -> tuple[Tensor, Normed]:
    """`stream + layer(x)`, and the same under the next norm. stream: [rows, hidden_size]."""
    given = Normed(x, None, norm.eps)
    return choose(given, layer, Epilogue.ADD).add(given, layer, stream, norm)


@dataclass(frozen=True)
class Beside:
    """What an MLP beside experts adds through a gate."""

    added: Tensor
    """[rows, hidden_size]"""
    gate: Linear
    """hidden_size -> 1, in 16 or 32 bits"""
    x: Normed
    """What the gate reads: the stream under a norm."""


@EXPERTS.op
def add_mixture(
    x: Normed, experts: Experts, stream: Tensor, norm: RMSNorm, beside: Beside | None = None
) -> tuple[Tensor, Normed]:
    """`stream + experts(x)` and what is beside, and the same under the next norm.

    stream: [rows, hidden_size].
    """
    if beside is not None:
        stream = stream + beside.added * linear(beside.x, beside.gate).sigmoid()
    total = stream + experts(x.x)
    return total, normed(total, norm)

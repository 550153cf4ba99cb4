"""One launch adds to the residual stream, with the norms before and behind the sum.

A program has one row. Everything is rounded where the references round it, but for norms, which are
rounded with their weight.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.norm import RMSNorm
from peagle.ops.products.normed import Normed
from peagle.ops.residual import Beside
from peagle.ops.sandwich import Mixture, MixtureInputs
from peagle.ops.triton.launch import announce, overlap, wait
from peagle.ops.weight import Weight


class NormWeights(NamedTuple):
    """Weights of norms, [width] each; anything in place of what is not there."""

    following: Tensor
    """The norm before the next product."""
    own: Tensor
    """The norm of what is added."""
    dense: Tensor
    """The norm of what an MLP gives."""
    experts: Tensor
    """The norm of what experts beside it give."""


class MixtureRows(NamedTuple):
    """Weights of the norms by which a mixture reads a stream, and where the results are written."""

    experts_weight: Tensor
    router_scale: Tensor
    to_experts: Tensor
    routed: Tensor


class GatedRows(NamedTuple):
    """What is added to the stream through a gate."""

    added: Tensor
    """[rows, width]"""
    inputs: Tensor
    """[rows, width] what the gate reads: the stream under a norm."""
    gate: Weight
    """[1, width], a tensor"""


def normed(x: Tensor, norm: RMSNorm) -> Normed:
    """As the reference; x: [rows, width] with any row stride."""
    return _launch(x[:, None], None, norm)[1]


def add_normed(
    summands: Tensor, stream: Tensor, norm: RMSNorm, beside: Beside | None = None
) -> tuple[Tensor, Normed]:
    """`stream + summands.sum(dim=1)` and what is beside, and the same under the next norm.

    summands: [rows, count, width]; stream: [rows, width].
    """
    return _launch(summands, stream, norm, beside=beside)


def add(
    product: Tensor, own: RMSNorm, stream: Tensor, norm: RMSNorm, scalar: Tensor | None = None
) -> tuple[Tensor, Normed]:
    """As the reference."""
    return _launch(product[:, None], stream, norm, own, scalar)


def add_before_mixture(
    product: Tensor, own: RMSNorm, stream: Tensor, norm: RMSNorm, mixture: Mixture
) -> tuple[Tensor, MixtureInputs]:
    """As the reference."""
    to_experts, routed = torch.empty_like(stream), torch.empty_like(stream)
    weights = mixture.input_norm.weight, mixture.experts.router_scale
    read = MixtureRows(*weights, to_experts, routed)
    total, dense = _launch(product[:, None], stream, norm, own, read=read)
    return total, MixtureInputs(dense, to_experts, routed)


def add_summands(
    dense: Tensor, summands: Tensor, mixture: Mixture, stream: Tensor, norm: RMSNorm
) -> tuple[Tensor, Normed]:
    """As the reference."""
    how = mixture.norm, mixture.scalar
    return _launch(summands, stream, norm, *how, dense=dense, mixture=mixture)


def _launch(
    summands: Tensor,
    stream: Tensor | None,
    norm: RMSNorm,
    own: RMSNorm | None = None,
    scalar: Tensor | None = None,
    read: MixtureRows | None = None,
    dense: Tensor | None = None,
    mixture: Mixture | None = None,
    beside: Beside | None = None,
) -> tuple[Tensor, Normed]:
    """The stream with what is added, and that normed: [rows, width] both."""
    rows, count, width = summands.shape
    total, out = (summands.new_empty(rows, width) for _ in range(2))
    block = triton.next_power_of_2(width)
    # in place of a norm that is not there stands another, which the kernel does not read
    weights: list[Any] = [norm, own or norm]
    weights += (norm, norm) if mixture is None else (mixture.dense_norm, mixture.experts_norm)
    _add_normed[(rows,)](
        summands,
        dense,
        stream,
        scalar,
        NormWeights(*(each.weight for each in weights)),
        read,
        beside and GatedRows(beside.added, beside.x.x, beside.gate.weight),
        total,
        out,
        width,
        summands.stride(0),
        (beside.x if beside else own or norm).eps,
        norm.eps,
        width**-0.5,
        COUNT=count,
        OWN=own is not None,
        SCALED=beside is not None and beside.x.squares is not None,
        BLOCK=block,
        **overlap(summands),
        num_warps=4 if block <= 1024 else 8 if block <= 4096 else 16,
    )
    return total, Normed(out, None, norm.eps)


@triton.jit
def _row(at, inside):
    """A row [BLOCK] in float32."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _unit(value, width, eps):
    """A row [BLOCK] in float32 divided by its root mean square."""
    return value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)


@triton.jit
def _mixed(dense, summed, weights, at, column, inside, width, eps):
    """What an MLP gives and what experts do, each normed, and their sum."""
    kind: tl.constexpr = dense.dtype.element_ty
    given = _row(dense + at, inside)
    by_dense = _row(weights.dense + column, inside)
    by_experts = _row(weights.experts + column, inside)
    # rounded before and behind every norm, where the reference writes tensors
    mixed = _unit(summed.to(kind).to(tl.float32), width, eps)
    mixed = (mixed * by_experts).to(kind).to(tl.float32)
    given = (_unit(given, width, eps) * by_dense).to(kind).to(tl.float32)
    return (given + mixed).to(kind).to(tl.float32)


@triton.jit
def _through_gate(before, gated, at, column, inside, width, eps, SCALED: tl.constexpr):
    """A row of the stream and what is added to it through a gate, rounded as the reference does."""
    kind: tl.constexpr = gated.added.dtype.element_ty
    added, read = _row(gated.added + at, inside), _row(gated.inputs + at, inside)
    factor = tl.sum(read * _row(gated.gate + column, inside), 0)
    if SCALED:
        factor *= tl.rsqrt(tl.sum(before * before, 0) / width + eps)
    factor = tl.sigmoid(factor.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    return (before + (added * factor).to(kind).to(tl.float32)).to(kind).to(tl.float32)


@triton.jit
def _add_normed(
    summands,
    dense,
    stream,
    scalar,
    weights,
    read,
    gated,
    total,
    out,
    width,
    stride,
    eps,
    next_eps,
    factor,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    announce(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside, at = column < width, row * width + column
    kind: tl.constexpr = out.dtype.element_ty
    place = summands + row * stride + column
    # a load behind a sum would wait for it: weights are loaded before the wait, rows right after
    following = _row(weights.following + column, inside)
    if OWN:
        own = _row(weights.own + column, inside)
    wait(OVERLAP)
    value = _row(place, inside)
    for index in tl.static_range(1, COUNT):
        value += _row(place + index * width, inside)
    if stream is not None:
        before = _row(stream + at, inside)
    if dense is not None:
        value = _mixed(dense, value, weights, at, column, inside, width, eps)
    if OWN:
        value = _unit(value, width, eps) * own
    if stream is not None:
        if gated is not None:
            before = _through_gate(before, gated, at, column, inside, width, eps, SCALED)
        # rounded as a product is that is written before it is added
        value = (before + value.to(kind).to(tl.float32)).to(kind)
        if scalar is not None:
            value = (value.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(kind)
        tl.store(total + at, value, mask=inside)
        value = value.to(tl.float32)
    # one pass over the row for all norms of it, which differ by their weights alone
    unit = _unit(value, width, next_eps)
    tl.store(out + at, (unit * following).to(kind), mask=inside)
    if read is not None:
        to_experts = unit * _row(read.experts_weight + column, inside)
        tl.store(read.to_experts + at, to_experts.to(kind), mask=inside)
        # of experts that are close to each other, every rounding on the router's way decides
        routed = unit.to(kind).to(tl.float32) * _row(read.router_scale + column, inside)
        routed = routed.to(kind).to(tl.float32) * factor
        tl.store(read.routed + at, routed.to(kind), mask=inside)

"""What a sandwich block adds to the residual stream, the sum, and the norms after it: one launch.

A program has one row. Everything is rounded where the references round it, but for norms, which are
rounded with their weight.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.launch import begin, overlap
from peagle.ops.triton.residual import warps_of_norm


class MixtureNorms(NamedTuple):
    """What a mixture reads of a stream: weights of its norms, and where that is written; anything
    in place of what it is not."""

    experts_weight: Tensor
    router_scale: Tensor
    to_experts: Tensor
    routed: Tensor


def add(
    product: Tensor,
    own_weight: Tensor,
    own_eps: float,
    stream: Tensor,
    scalar: Tensor | None,
    norm_weight: Tensor,
    norm_eps: float,
    mixture: MixtureNorms | None = None,
) -> tuple[Tensor, Tensor]:
    """The stream with what is added, times scalar [1], and that normed: [rows, width] both."""
    total, out = torch.empty_like(stream), torch.empty_like(stream)
    width = stream.shape[1]
    _add_normed[(len(stream),)](
        product,
        own_weight,
        stream,
        stream if scalar is None else scalar,
        norm_weight,
        total,
        out,
        mixture or MixtureNorms(norm_weight, norm_weight, out, out),
        width,
        own_eps,
        norm_eps,
        0.0 if mixture is None else width**-0.5,
        SCALAR=scalar is not None,
        MIXTURE=mixture is not None,
        **_form(stream),
    )
    return total, out


def add_before_mixture(
    product: Tensor,
    own_weight: Tensor,
    stream: Tensor,
    norm_weight: Tensor,
    experts_weight: Tensor,
    router_scale: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The stream with what is added, and what MLP, experts and router read: [rows, width] each.

    The router reads the normed stream times router_scale [width] / sqrt(width).
    """
    to_experts, routed = torch.empty_like(stream), torch.empty_like(stream)
    mixture = MixtureNorms(experts_weight, router_scale, to_experts, routed)
    total, out = add(product, own_weight, eps, stream, None, norm_weight, eps, mixture)
    return total, out, to_experts, routed


def add_mixture(
    dense: Tensor,
    summands: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    eps: float,
    stream: Tensor,
    scalar: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """The stream with what MLP and experts give, times scalar [1], and that normed.

    dense, stream: [rows, width]; summands: [rows, count, width]; weights: [width] each, of the
    norms of what the MLP gives, of what the experts do, and of their sum.
    """
    total, out = torch.empty_like(stream), torch.empty_like(stream)
    _add_mixture_normed[(len(stream),)](
        dense,
        summands,
        *weights,
        stream,
        scalar,
        norm_weight,
        total,
        out,
        stream.shape[1],
        eps,
        norm_eps,
        COUNT=summands.shape[1],
        **_form(stream),
    )
    return total, out


def _form(stream: Tensor) -> dict[str, Any]:
    """What the kernels are compiled with for a stream's width."""
    block = triton.next_power_of_2(stream.shape[1])
    return {"BLOCK": block, **overlap(stream), "num_warps": warps_of_norm(block)}


@triton.jit
def _unit(value, width, eps):
    """A row [BLOCK] in float32 divided by its root mean square."""
    return value * tl.rsqrt(tl.sum(value * value, 0) / width + eps)


@triton.jit
def _under(unit, weight, column, inside):
    """A row that `_unit` gave, times a norm's weight."""
    return unit * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _sum(given, stream, scalar, at, inside, SCALAR: tl.constexpr):
    """A row of the stream and what is added to it, in the stream's type."""
    kind: tl.constexpr = stream.dtype.element_ty
    before = tl.load(stream + at, mask=inside, other=0.0).to(tl.float32)
    value = (before + given.to(kind).to(tl.float32)).to(kind)
    if SCALAR:
        value = (value.to(tl.float32) * tl.load(scalar).to(tl.float32)).to(kind)
    return value


@triton.jit
def _add_normed(
    product,
    own_weight,
    stream,
    scalar,
    norm_weight,
    total,
    out,
    mixture,
    width,
    eps,
    next_eps,
    factor,
    SCALAR: tl.constexpr,
    MIXTURE: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    kind: tl.constexpr = total.dtype.element_ty
    given = tl.load(product + at, mask=inside, other=0.0).to(tl.float32)
    given = _under(_unit(given, width, eps), own_weight, column, inside)
    value = _sum(given, stream, scalar, at, inside, SCALAR)
    tl.store(total + at, value, mask=inside)
    unit = _unit(value.to(tl.float32), width, next_eps)
    tl.store(out + at, _under(unit, norm_weight, column, inside).to(kind), mask=inside)
    if MIXTURE:
        under = _under(unit, mixture.experts_weight, column, inside)
        tl.store(mixture.to_experts + at, under.to(kind), mask=inside)
        # of experts that are close to each other, every rounding on the router's way decides
        read = _under(unit.to(kind).to(tl.float32), mixture.router_scale, column, inside).to(kind)
        tl.store(mixture.routed + at, (read.to(tl.float32) * factor).to(kind), mask=inside)


@triton.jit
def _add_mixture_normed(
    dense,
    summands,
    dense_weight,
    experts_weight,
    own_weight,
    stream,
    scalar,
    norm_weight,
    total,
    out,
    width,
    eps,
    next_eps,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    kind: tl.constexpr = total.dtype.element_ty
    mixed = tl.zeros([BLOCK], tl.float32)
    for index in tl.static_range(COUNT):
        place = summands + (row * COUNT + index) * width + column
        mixed += tl.load(place, mask=inside, other=0.0).to(tl.float32)
    mixed = _unit(mixed.to(kind).to(tl.float32), width, eps)
    mixed = _under(mixed, experts_weight, column, inside).to(kind).to(tl.float32)
    given = tl.load(dense + at, mask=inside, other=0.0).to(tl.float32)
    given = _under(_unit(given, width, eps), dense_weight, column, inside).to(kind).to(tl.float32)
    given = (given + mixed).to(kind).to(tl.float32)
    given = _under(_unit(given, width, eps), own_weight, column, inside)
    value = _sum(given, stream, scalar, at, inside, True)
    tl.store(total + at, value, mask=inside)
    unit = _unit(value.to(tl.float32), width, next_eps)
    tl.store(out + at, _under(unit, norm_weight, column, inside).to(kind), mask=inside)

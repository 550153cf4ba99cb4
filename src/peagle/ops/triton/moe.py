"""A mixture of experts: route (one launch, three for many rows), gate and up, down, sum and norm.

A *pair* is one row at one of its experts: row * top_k + choice. Pairs are ordered by expert and cut
into *blocks* of pairs of one expert; a program multiplies one block by a strip of that expert's
weight. How many blocks there are is known on the device alone: a launch has programs for as many as
there could be, and those too many return at once. So nothing waits for the host, shapes depend on
the number of rows only, and a CUDA graph can hold it all.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.moe import ALPHA, ExpertWeights, RoutedExperts
from peagle.ops.products.normed import Normed
from peagle.ops.triton import quantized_experts as packed
from peagle.ops.triton.expert_blocks import ExpertSizes, Gates, Routing, block_of, launch
from peagle.ops.triton.launch import announce, begin, overlap, wait
from peagle.ops.triton.residual import warps_of_norm
from peagle.ops.triton.routing import Router, route
from peagle.ops.triton.swiglu import clamped_swiglu, gated
from peagle.ops.weight import QuantizedWeight, Weight, dense


@dataclass(frozen=True)
class Strip:
    """What a program of a product works on."""

    columns: int
    """Outputs of the weight."""
    depth: int
    """Inputs in one step, side by side in memory; half as many where they are four bytes each."""
    warps: int
    stages: int


@dataclass(frozen=True)
class PairBlocks:
    """Sizes for some number of pairs an expert."""

    block: int
    """Most pairs in a block."""
    gate_up: Strip
    """Its columns are the gate's; as many of up come along."""
    down: Strip


# With few pairs an expert, reading weights takes all the time: strips are thin, so that many are
# under way. With many the tensor cores take it: tiles are large, so that each read serves often.
FEW = PairBlocks(16, Strip(32, 128, 4, 4), Strip(64, 128, 4, 4))
SEVERAL = PairBlocks(32, Strip(64, 64, 4, 4), Strip(128, 64, 4, 4))
SOME = PairBlocks(64, Strip(64, 64, 4, 4), Strip(128, 64, 4, 4))
MANY = PairBlocks(128, Strip(128, 64, 8, 3), Strip(128, 64, 8, 3))
MOST_PAIRS = ((8, FEW), (16, SEVERAL), (64, SOME))
"""Up to how many pairs an expert each but the largest is used."""


def takes(gate_up: Weight, down: Weight) -> bool:
    """Whether these kernels cover experts' weights on their device."""
    return all(isinstance(w, Tensor) or packed.takes(w) for w in (gate_up, down))


def moe(x: Tensor, weights: ExpertWeights) -> Tensor:
    """The same as `peagle.ops.moe.moe`, with every sum taken in float32.

    x, result: [rows, hidden] in bfloat16, float16 or float32. The weights must be contiguous.
    """
    given = Normed(x.contiguous(), None, 0.0)
    outputs = _outputs(given, given, weights)
    return outputs.view(len(x), weights.top_k, x.shape[1]).sum(dim=1)


def summands(x: Tensor, routed: Tensor, weights: ExpertWeights) -> Tensor:
    """As of `peagle.ops.moe.ScaledExperts`: [rows, top_k, hidden].

    x, routed: [rows, hidden], the latter what the router reads.
    """
    given, read = (Normed(rows.contiguous(), None, 0.0) for rows in (x, routed))
    outputs = _outputs(given, read, weights, gelu=True)
    return outputs.view(len(x), weights.top_k, x.shape[1])


def add(
    x: Normed, stream: Tensor, norm_weight: Tensor, norm_eps: float, weights: ExpertWeights
) -> tuple[Tensor, Tensor]:
    """`stream + moe(x)`, and that normed: [rows, hidden] both."""
    outputs = _outputs(x, x, weights)
    total, out = torch.empty_like(stream), torch.empty_like(stream)
    rows, width = stream.shape
    block = triton.next_power_of_2(width)
    _add_kernel[(rows,)](
        stream,
        outputs,
        norm_weight,
        total,
        out,
        width,
        norm_eps,
        TOP_K=weights.top_k,
        BLOCK=block,
        **overlap(stream),
        num_warps=warps_of_norm(block),
    )
    return total, out


def _outputs(x: Normed, routed: Normed, weights: ExpertWeights, gelu: bool = False) -> Tensor:
    """What every pair's expert makes of it, weighed: [pairs, hidden].

    routed: what the router reads, x or its like; gelu: GEGLU, not SwiGLU.
    """
    gate_up, down, clamped = weights.gate_up, weights.down, weights.clamped
    bias, fixed = None if clamped is None else clamped.router, weights.batch_invariant
    how = weights.top_k, weights.normalize, fixed, weights.factors
    router = Router(weights.router, bias, *how)
    pairs, (experts, hidden, inner) = len(x.x) * router.top_k, down.shape
    tiles = tiles_for(0.0 if fixed else pairs / experts, x.x.dtype)
    activated, outputs = x.x.new_empty(pairs, inner), x.x.new_empty(pairs, hidden)
    block = tiles.block
    if few_bits := isinstance(gate_up, QuantizedWeight) and isinstance(down, QuantizedWeight):
        block = min(block, packed.LARGEST_BLOCK)
    routing = route(routed, router, block)
    limit = 0.0 if clamped is None else clamped.limit
    gates = Gates(router.top_k, routing.scales is not None, limit, ALPHA, gelu)
    of_gate_up, of_down = (None, None) if clamped is None else (clamped.gate_up, clamped.down)
    if few_bits:
        packed.gate_up(x.x, gate_up, of_gate_up, routing, gates, activated)
        packed.down(activated, down, of_down, routing, outputs)
        return outputs
    given = tiles.gate_up, routing, x.x, dense(gate_up), of_gate_up, routing.scales, activated
    _launch(_gate_up_kernel, *given, G=gates)
    given = tiles.down, routing, activated, dense(down), of_down, routing.weights, outputs
    _launch(_down_kernel, *given, **overlap(activated))
    return outputs


def tiles_for(pairs_an_expert: float, dtype: torch.dtype) -> PairBlocks:
    """The tiles for so many pairs if all experts were chosen equally often."""
    # exact float32 products run outside the tensor cores, where large tiles outgrow the registers
    if dtype == torch.float32:
        return FEW
    return next((tiles for most, tiles in MOST_PAIRS if pairs_an_expert <= most), MANY)


def warm_up(experts: RoutedExperts, most_rows: int) -> None:
    """Compile what passes of up to `most_rows` rows need, whatever the size of their tiles."""
    count, hidden = experts.router.shape
    for pairs_an_expert, _ in MOST_PAIRS:
        rows = pairs_an_expert * count // experts.top_k + 1
        if rows <= most_rows:
            experts.mixed(experts.router.new_zeros(rows, hidden))


def _launch(
    kernel: Any,
    strip: Strip,
    routing: Routing,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
    out: Tensor,
    **form: Any,
) -> None:
    columns, step = out.shape[1], strip.depth * 2 // max(2, x.element_size())
    sizes = ExpertSizes(
        columns, weight.shape[2], bias is not None, routing.block, strip.columns, step
    )
    form |= {"num_warps": strip.warps, "num_stages": strip.stages}
    launch(kernel, sizes, columns, x, weight, bias, factors, routing, out, **form)


@triton.jit
def _read(at, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _gate_up_kernel(x, weight, bias, out, scales, layout, E: tl.constexpr, G: tl.constexpr):
    """silu(x @ gate.T) * (x @ up.T) of a block's pairs. x: [rows, depth]; out: [places, columns]

    Where there is a bias, `clamped_swiglu` instead. A plain launch: after it, everything launched
    before is done.
    """
    blocks_there = tl.load(layout.num_blocks)
    expert, place, real = block_of(layout.blocks, tl.program_id(1), E.pairs)
    if tl.program_id(1) >= blocks_there:
        return
    row = tl.load(layout.order + place) // G.top_k
    column = tl.program_id(0) * E.lines + tl.arange(0, E.lines)
    step = tl.arange(0, E.step)
    x_at = x + row.to(tl.int64)[:, None] * E.depth + step[None, :]
    own = expert * (2 * E.columns) + tl.minimum(column, E.columns - 1)
    gate_at = weight + own[None, :] * E.depth + step[:, None]
    shape: tl.constexpr = [E.pairs, E.lines]
    gate = tl.zeros(shape, tl.float32)
    up = tl.zeros(shape, tl.float32)
    for k in range(0, E.depth, E.step):
        inside = step < E.depth - k
        rows = _read(x_at + k, inside[None, :], E.depth % E.step == 0)
        part = _read(gate_at + k, inside[:, None], E.depth % E.step == 0)
        gate = tl.dot(rows, part, gate, input_precision="ieee")
        part = _read(gate_at + (E.columns * E.depth + k), inside[:, None], E.depth % E.step == 0)
        up = tl.dot(rows, part, up, input_precision="ieee")
    if G.scaled:
        scale = tl.load(scales + row)[:, None]
        gate *= scale
        up *= scale
    if E.bias:
        gate += tl.load(bias + own).to(tl.float32)[None, :]
        up += tl.load(bias + own + E.columns).to(tl.float32)[None, :]
        activated = clamped_swiglu(gate, up, G.limit, G.alpha)
    else:
        activated = gated(gate, up, G.gelu)
    out_at = out + place[:, None] * E.columns + column[None, :]
    tl.store(out_at, activated, mask=real[:, None] & (column < E.columns)[None, :])


@triton.jit
def _down_kernel(x, weight, bias, out, weights, layout, E: tl.constexpr, OVERLAP: tl.constexpr):
    """(x @ down.T) * router weight of a block's pairs. x: [places, depth]; out: [pairs, columns]"""
    announce(OVERLAP)
    # the routing is there since the gate's launch
    blocks_there = tl.load(layout.num_blocks)
    expert, place, real = block_of(layout.blocks, tl.program_id(1), E.pairs)
    if tl.program_id(1) >= blocks_there:
        return
    column = tl.program_id(0) * E.lines + tl.arange(0, E.lines)
    step = tl.arange(0, E.step)
    x_at = x + place[:, None] * E.depth + step[None, :]
    own = expert * E.columns + tl.minimum(column, E.columns - 1)
    down_at = weight + own[None, :] * E.depth + step[:, None]
    shape: tl.constexpr = [E.pairs, E.lines]
    total = tl.zeros(shape, tl.float32)
    pair = tl.load(layout.order + place).to(tl.int64)
    factor = tl.load(weights + pair).to(tl.float32)[:, None]
    wait(OVERLAP)
    for k in range(0, E.depth, E.step):
        inside = step < E.depth - k
        rows = _read(x_at + k, inside[None, :], E.depth % E.step == 0)
        part = _read(down_at + k, inside[:, None], E.depth % E.step == 0)
        total = tl.dot(rows, part, total, input_precision="ieee")
    if E.bias:
        total += tl.load(bias + own).to(tl.float32)[None, :]
    total *= factor
    out_at = out + pair[:, None] * E.columns + column[None, :]
    tl.store(out_at, total, mask=real[:, None] & (column < E.columns)[None, :])


@triton.jit
def _add_kernel(
    stream,
    outputs,
    weight,
    total,
    out,
    width,
    eps,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A row's stream and the sum of its pairs' outputs, and that normed."""
    begin(OVERLAP)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < width
    kind = total.dtype.element_ty
    mixed = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOP_K):
        at = outputs + (row * TOP_K + choice) * width + column
        mixed += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(stream + row * width + column, mask=inside, other=0.0).to(tl.float32)
    value = (before + mixed.to(kind).to(tl.float32)).to(kind)
    tl.store(total + row * width + column, value, mask=inside)
    value = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (value * factor * scale).to(kind), mask=inside)

"""A mixture of experts in a few launches: route, gate and up of every expert, down, sum.

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
from torch.nn import functional as F

from peagle.ops.moe import ALPHA, Clamped
from peagle.ops.triton.routing import Routing, route


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
class Tiles:
    """Sizes for some number of pairs an expert."""

    block: int
    """Most pairs in a block."""
    gate_up: Strip
    """Its columns are the gate's; as many of up come along."""
    down: Strip


# With few pairs an expert, reading weights takes all the time: strips are thin, so that many are
# under way. With many the tensor cores take it: tiles are large, so that each read serves often.
FEW = Tiles(16, Strip(16, 128, 4, 4), Strip(32, 128, 4, 4))
SOME = Tiles(64, Strip(64, 64, 4, 4), Strip(128, 64, 4, 4))
MANY = Tiles(128, Strip(128, 64, 8, 3), Strip(128, 64, 8, 3))


def moe(
    x: Tensor,
    router_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    normalize: bool,
    clamped: Clamped | None = None,
) -> Tensor:
    """The same as `peagle.ops.moe.moe`, with every sum taken in float32.

    x, result: [rows, hidden] in bfloat16, float16 or float32; router_weight: [experts, hidden];
    gate_up: [experts, 2 * inner, hidden], gate before up; down: [experts, hidden, inner]. The
    weights must be contiguous.
    """
    rows, (experts, hidden, inner) = len(x), down.shape
    tiles = tiles_for(rows * top_k / experts, x.dtype)
    logits = F.linear(x, router_weight, None if clamped is None else clamped.router)
    routing = route(logits, top_k, normalize, tiles.block)
    activated = x.new_empty(rows * top_k, inner)
    _launch(_gate_up_kernel, tiles.gate_up, routing, x.contiguous(), gate_up, activated, clamped)
    outputs = x.new_empty(rows * top_k, hidden)
    _launch(_down_kernel, tiles.down, routing, activated, down, outputs, clamped)
    return outputs.view(rows, top_k, hidden).sum(dim=1)


def tiles_for(pairs_an_expert: float, dtype: torch.dtype) -> Tiles:
    """The tiles for so many pairs if all experts were chosen equally often."""
    # exact float32 products run outside the tensor cores, where large tiles outgrow the registers
    if pairs_an_expert <= 8 or dtype == torch.float32:
        return FEW
    return SOME if pairs_an_expert <= 64 else MANY


def _launch(
    kernel: Any,
    strip: Strip,
    routing: Routing,
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    clamped: Clamped | None,
) -> None:
    """Fill out [pairs, columns] from x [rows or pairs, depth] and weight [experts, ..., depth]."""
    columns, bias = out.shape[1], weight
    if clamped is not None:
        bias = clamped.gate_up if kernel is _gate_up_kernel else clamped.down
    kernel[(triton.cdiv(columns, strip.columns), len(routing.blocks))](
        x,
        weight,
        bias,
        out,
        routing.weights,
        routing.order,
        routing.blocks,
        routing.count,
        COLUMNS=columns,
        DEPTH=weight.shape[2],
        TOP_K=routing.top_k,
        BIAS=clamped is not None,
        LIMIT=0.0 if clamped is None else clamped.limit,
        ALPHA=ALPHA,
        BLOCK_M=routing.block,
        BLOCK_N=strip.columns,
        BLOCK_K=strip.depth * 2 // max(2, x.element_size()),
        num_warps=strip.warps,
        num_stages=strip.stages,
    )


@triton.jit
def _block(blocks, block, BLOCK_M: tl.constexpr):
    """A block's expert, its places in the order (its last one repeated), and which are real."""
    expert = tl.load(blocks + 3 * block).to(tl.int64)
    place = tl.load(blocks + 3 * block + 1) + tl.arange(0, BLOCK_M)
    past = tl.load(blocks + 3 * block + 2)
    return expert, tl.minimum(place, past - 1).to(tl.int64), place < past


@triton.jit
def _read(at, inside, WHOLE: tl.constexpr):
    if WHOLE:
        return tl.load(at)
    else:  # noqa: RET505 (Triton compiles one branch only, so there must be two)
        return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _gate_up_kernel(
    x,
    weight,
    bias,
    out,
    weights,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """silu(x @ gate.T) * (x @ up.T) of a block's pairs. x: [rows, depth]; out: [places, columns]

    BIAS: with a bias and `clamped_swiglu` instead.
    """
    if tl.program_id(1) >= tl.load(count):
        return
    expert, place, real = _block(blocks, tl.program_id(1), BLOCK_M)
    row = tl.load(order + place) // TOP_K
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * DEPTH + step[None, :]
    own = expert * (2 * COLUMNS) + tl.minimum(column, COLUMNS - 1)
    gate_at = weight + own[None, :] * DEPTH + step[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        inside = step < DEPTH - k
        rows = _read(x_at + k, inside[None, :], DEPTH % BLOCK_K == 0)
        part = _read(gate_at + k, inside[:, None], DEPTH % BLOCK_K == 0)
        gate = tl.dot(rows, part, gate, input_precision="ieee")
        part = _read(gate_at + (COLUMNS * DEPTH + k), inside[:, None], DEPTH % BLOCK_K == 0)
        up = tl.dot(rows, part, up, input_precision="ieee")
    if BIAS:
        gate += tl.load(bias + own).to(tl.float32)[None, :]
        up += tl.load(bias + own + COLUMNS).to(tl.float32)[None, :]
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
        activated = gate * tl.sigmoid(ALPHA * gate) * (up + 1)
    else:
        activated = gate * tl.sigmoid(gate) * up
    out_at = out + place[:, None] * COLUMNS + column[None, :]
    tl.store(out_at, activated, mask=real[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _down_kernel(
    x,
    weight,
    bias,
    out,
    weights,
    order,
    blocks,
    count,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TOP_K: tl.constexpr,
    BIAS: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(x @ down.T) * router weight of a block's pairs. x: [places, depth]; out: [pairs, columns]"""
    if tl.program_id(1) >= tl.load(count):
        return
    expert, place, real = _block(blocks, tl.program_id(1), BLOCK_M)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    x_at = x + place[:, None] * DEPTH + step[None, :]
    own = expert * COLUMNS + tl.minimum(column, COLUMNS - 1)
    down_at = weight + own[None, :] * DEPTH + step[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in range(0, DEPTH, BLOCK_K):
        inside = step < DEPTH - k
        rows = _read(x_at + k, inside[None, :], DEPTH % BLOCK_K == 0)
        part = _read(down_at + k, inside[:, None], DEPTH % BLOCK_K == 0)
        total = tl.dot(rows, part, total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + own).to(tl.float32)[None, :]
    pair = tl.load(order + place).to(tl.int64)
    total *= tl.load(weights + pair).to(tl.float32)[:, None]
    out_at = out + pair[:, None] * COLUMNS + column[None, :]
    tl.store(out_at, total, mask=real[:, None] & (column < COLUMNS)[None, :])

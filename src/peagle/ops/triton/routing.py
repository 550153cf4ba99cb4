"""How every row's experts are chosen (words as in `moe.py`)."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from peagle.ops.moe import ExpertWeights
from peagle.ops.products.normed import Normed
from peagle.ops.triton.expert_blocks import (
    BlockLayout,
    Routing,
    lanes,
    lay_out_few,
    lay_out_many,
    most_blocks,
)
from peagle.ops.triton.few_rows import invariant
from peagle.ops.triton.launch import announce, begin, counters, overlap, wait
from peagle.ops.triton.product_call import over_rms

FEW = tl.constexpr(16)
"""Rows that one program can lay out: an expert's fit one block."""
SHARE, COLUMNS = tl.constexpr(256), tl.constexpr(16)
"""Inputs and outputs of the router that one program multiplies where rows are few."""
ROUTED = 4
"""Rows that one program routes where they are many."""


class RouterEpilogue(NamedTuple):
    """What follows the router's product; anything in place of what does not."""

    squares: Tensor
    """[parts, held]"""
    parts: int
    held: int
    eps: float
    scales: Tensor
    """[rows] to be filled"""
    weights: Tensor
    """[pairs] likewise"""
    bias: Tensor
    factors: Tensor


@dataclass(frozen=True)
class RouterSizes:
    """What kernels that choose experts are compiled with."""

    depth: int
    parts: int
    scaled: bool
    bias: bool
    experts: int
    lanes: int
    top_k: int
    normalize: bool
    factors: bool


def route(x: Normed, experts: ExpertWeights, block: int) -> Routing:
    """Every row's experts, and the blocks that they make. x: [rows, hidden], contiguous.

    block: at least `FEW`.
    """
    rows = len(x.x)
    pairs = rows * experts.top_k
    weights, order = x.x.new_empty(pairs), x.x.new_empty(pairs, dtype=torch.int32)
    blocks = order.new_empty(most_blocks(pairs, len(experts.router), block), 3)
    scales = None if x.squares is None else x.squares.new_empty(rows)
    layout = BlockLayout(order, blocks, order.new_empty(1))
    routing = Routing(weights, scales, layout, block)
    # `_route_few` adds the depth in pieces, in another order than `invariant`
    few = rows <= FEW.value and not experts.batch_invariant
    (_route_few if few else _route_many)(x, experts, routing)
    return routing


def _route_few(x: Normed, experts: ExpertWeights, routing: Routing) -> None:
    """Fill a routing in one launch."""
    (rows, depth), choice = x.x.shape, _choice(x, experts)
    grid = triton.cdiv(len(experts.router), COLUMNS.value), triton.cdiv(depth, SHARE.value)
    pieces = grid[1], FEW.value, choice.lanes
    partial = torch.empty(pieces, device=x.x.device, dtype=torch.float32)
    _route_few_kernel[grid](
        x.x,
        experts.router,
        partial,
        counters(x.x.device, 1),
        _behind(x, experts, routing),
        routing.layout,
        rows,
        R=triton.next_power_of_2(max(rows, 1)),
        C=choice,
        **overlap(x.x),
    )


def _route_many(x: Normed, experts: ExpertWeights, routing: Routing) -> None:
    """Fill a routing in three launches: the router's product, rows' choices, experts' layouts.

    A product that is scaled afterwards is rounded twice in this way, in `_route_few` once.
    """
    rows = len(x.x)
    chosen, choice, bias = torch.empty_like(routing.layout.order), _choice(x, experts), None
    if x.squares is None:  # the product is rounded once, with its bias
        bias, choice = experts.router_bias, replace(choice, bias=False)
    product = invariant if experts.batch_invariant else F.linear
    _route_kernel[(triton.cdiv(rows, ROUTED),)](
        product(x.x, experts.router, bias),
        chosen,
        _behind(x, experts, routing),
        rows,
        R=ROUTED,
        C=choice,
        **overlap(x.x),
    )
    lay_out_many(chosen, len(experts.router), routing)


def _behind(x: Normed, experts: ExpertWeights, routing: Routing) -> RouterEpilogue:
    parts, held = (0, 0) if x.squares is None else x.squares.shape
    filled = routing.scales, routing.weights
    given = x.squares, *filled, experts.router_bias, experts.factors
    squares, *others = (experts.router if each is None else each for each in given)
    return RouterEpilogue(squares, parts, held, x.eps, *others)


def _choice(x: Normed, experts: ExpertWeights) -> RouterSizes:
    count, squares = len(experts.router), x.squares
    return RouterSizes(
        depth=x.x.shape[1],
        parts=1 if squares is None else triton.next_power_of_2(len(squares)),
        scaled=squares is not None,
        bias=experts.router_bias is not None,
        experts=count,
        lanes=lanes(count),
        top_k=experts.top_k,
        normalize=experts.normalize,
        factors=experts.factors is not None,
    )


@triton.jit
def _finished(logits, behind, row, rows, C: tl.constexpr):
    """The router's logits [R, lanes] from its product; stores what scales the rows."""
    if C.scaled:
        scale = over_rms(behind.squares, behind, row, row < rows, C.depth, C.parts)
        tl.store(behind.scales + row, scale, mask=row < rows)
        logits *= scale[:, None]
    if C.bias:
        expert = tl.arange(0, C.lanes)
        added = tl.load(behind.bias + expert, mask=expert < C.experts, other=0.0)
        logits += added.to(tl.float32)[None, :]
    return logits


@triton.jit
def _choose(scores, behind, row, rows, C: tl.constexpr):
    """Store the weights of some rows' pairs; returns which of [R, lanes] are pairs, and which one.

    scores: [R, lanes] the router's logits, rounded to the rows' type: of experts that are close
    to each other this decides.
    """
    kind: tl.constexpr = behind.weights.dtype.element_ty
    expert = tl.arange(0, C.lanes)[None, :]
    real = expert < C.experts
    scores = tl.where(real, scores.to(kind).to(tl.float32), float("-inf"))
    scores = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    scores /= tl.sum(scores, axis=1)[:, None]
    # a row that is not a number still gets experts, all different, and only its own result is lost
    left = tl.where(real, tl.where(scores == scores, scores, 0.0), -1.0)
    choice = tl.zeros(scores.shape, tl.int32)
    top_k: tl.constexpr = C.top_k
    for index in tl.static_range(top_k):
        best = expert == tl.argmax(left, axis=1)[:, None]
        choice = tl.where(best, index + 1, choice)
        # below all that is left: no choice comes twice
        left = tl.where(best, -2.0, left)
    kept = tl.where(choice > 0, scores, 0.0)
    if C.normalize:
        kept /= tl.sum(kept, axis=1)[:, None]
    if C.factors:
        own = tl.load(behind.factors + expert, mask=real, other=0.0).to(tl.float32)
        # rounded before it is multiplied, as the reference's weights are
        kept = kept.to(kind).to(tl.float32) * own
    taken = (choice > 0) & (row[:, None] < rows)
    pair = row[:, None] * C.top_k + choice - 1
    tl.store(behind.weights + pair, kept, mask=taken)
    return taken, pair


@triton.jit(do_not_specialize=["rows"])
def _route_few_kernel(
    x,
    weight,
    partial,
    arrivals,
    behind,
    layout,
    rows,
    R: tl.constexpr,
    C: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The router's product in pieces; the program that ends last adds the pieces and lays pairs
    out."""
    announce(OVERLAP)
    row, expert = tl.arange(0, FEW), tl.arange(0, C.lanes)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.program_id(1) * SHARE + tl.arange(0, SHARE)
    inside = (step < C.depth)[:, None] & (column < C.experts)[None, :]
    # the router is nobody's result: it is read before the wait
    w = tl.load(weight + column[None, :] * C.depth + step[:, None], mask=inside, other=0.0)
    wait(OVERLAP)
    inside = (row < rows)[:, None] & (step < C.depth)[None, :]
    a = tl.load(x + row[:, None] * C.depth + step[None, :], mask=inside, other=0.0)
    product = tl.dot(a, w, input_precision="ieee")
    piece = partial + (tl.program_id(1) * FEW + row)[:, None] * C.lanes + column[None, :]
    tl.store(piece, product, mask=(row < rows)[:, None])
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") != tl.num_programs(0) * tl.num_programs(1) - 1:
        return
    tl.store(arrivals, 0)
    tl.debug_barrier()
    # a product takes 16 rows at least, what follows as many as there are
    row = tl.arange(0, R)
    wide: tl.constexpr = C.lanes
    logits = tl.zeros([R, wide], tl.float32)
    at = partial + row[:, None] * C.lanes + expert[None, :]
    inside = (row < rows)[:, None] & (expert < C.experts)[None, :]
    splits: tl.constexpr = (C.depth + SHARE - 1) // SHARE
    for split in tl.static_range(splits):
        piece = at + split * FEW * C.lanes
        logits += tl.load(piece, mask=inside, other=0.0, cache_modifier=".cg")
    logits = _finished(logits, behind, row, rows, C)
    taken, pair = _choose(logits, behind, row, rows, C)
    lay_out_few(taken, pair, layout, C.lanes)


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits, chosen, behind, rows, R: tl.constexpr, C: tl.constexpr, OVERLAP: tl.constexpr
):
    """The weight and the expert of every pair of R rows. logits: the router's product."""
    begin(OVERLAP)
    row = tl.program_id(0) * R + tl.arange(0, R)
    expert = tl.arange(0, C.lanes)[None, :]
    inside = (expert < C.experts) & (row < rows)[:, None]
    scores = tl.load(logits + row[:, None] * C.experts + expert, mask=inside, other=0.0)
    scores = _finished(scores.to(tl.float32), behind, row, rows, C)
    taken, pair = _choose(scores, behind, row, rows, C)
    tl.store(chosen + pair, expert + tl.zeros(pair.shape, tl.int32), mask=taken)

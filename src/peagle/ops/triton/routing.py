"""Every row's experts, and pairs laid out in blocks of one expert (words as in `moe.py`)."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

ROUTED = 4
"""Rows that one program routes where they are many."""
CHUNK = 4096
"""Pairs that a program lays out at a time."""


@dataclass(frozen=True)
class Routing:
    """Where every pair goes, on the device; int32 but for the weights."""

    weights: Tensor
    """[pairs] the router's, in the rows' type"""
    order: Tensor
    """[pairs] by expert, those of one expert by row"""
    blocks: Tensor
    """[most blocks, 3] a block's expert, its first place in `order` and the one past its last"""
    count: Tensor
    """[1] how many blocks there are"""
    top_k: int
    block: int
    """Most pairs in a block."""


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """How many blocks there are when pairs fall on experts in the worst way."""
    begun = min(pairs, experts)
    return begun + (pairs - begun) // block


def route(logits: Tensor, top_k: int, normalize: bool, block: int) -> Routing:
    """Every row's experts, and the blocks that they make. logits: [rows, experts], contiguous."""
    rows, experts = logits.shape
    pairs = rows * top_k
    order = logits.new_empty(pairs, dtype=torch.int32)
    blocks = logits.new_empty(most_blocks(pairs, experts, block), 3, dtype=torch.int32)
    count = logits.new_empty(1, dtype=torch.int32)
    routing = Routing(logits.new_empty(pairs), order, blocks, count, top_k, block)
    sizes = {"EXPERTS": experts, "BLOCK_E": max(32, triton.next_power_of_2(experts))}
    choice = {**sizes, "TOP_K": top_k, "NORMALIZE": normalize}
    laid = (order, blocks, count)
    if rows <= block:  # then no expert has more than one block
        _route_few_kernel[(1,)](logits, routing.weights, *laid, rows, BLOCK_R=block, **choice)
        return routing
    chosen, programs = torch.empty_like(order), triton.cdiv(rows, ROUTED)
    _route_kernel[(programs,)](logits, routing.weights, chosen, rows, BLOCK_R=ROUTED, **choice)
    _layout_kernel[(experts,)](
        chosen, *laid, pairs, BLOCK_M=block, CHUNK=CHUNK, **sizes, num_warps=8
    )
    return routing


@triton.jit
def _choose(
    logits,
    weights,
    row,
    rows,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
):
    """Store the weights of some rows' pairs; of [R, BLOCK_E] which are pairs, and their numbers."""
    expert = tl.arange(0, BLOCK_E)[None, :]
    real = expert < EXPERTS
    at = logits + row[:, None] * EXPERTS + expert
    scores = tl.load(at, mask=real & (row[:, None] < rows), other=0.0).to(tl.float32)
    scores = tl.where(real, scores, float("-inf"))
    scores = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    scores /= tl.sum(scores, axis=1)[:, None]
    # a row that is not a number still gets experts, all different, and only its own result is lost
    scores = tl.where(scores == scores, scores, 0.0)
    left = tl.where(real, scores, -1.0)
    choice = tl.zeros(scores.shape, tl.int32)
    for index in tl.static_range(TOP_K):
        best = expert == tl.argmax(left, axis=1)[:, None]
        choice = tl.where(best, index + 1, choice)
        left = tl.where(best, -2.0, left)
    kept = tl.where(choice > 0, scores, 0.0)
    if NORMALIZE:
        kept /= tl.sum(kept, axis=1)[:, None]
    taken = (choice > 0) & (row[:, None] < rows)
    pair = row[:, None] * TOP_K + choice - 1
    tl.store(weights + pair, kept, mask=taken)
    return taken, pair


@triton.jit(do_not_specialize=["rows"])
def _route_few_kernel(
    logits,
    weights,
    order,
    blocks,
    count,
    rows,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Weights and layout of all rows at once, when an expert's pairs fit a block."""
    row = tl.arange(0, BLOCK_R)
    taken, pair = _choose(logits, weights, row, rows, EXPERTS, BLOCK_E, TOP_K, NORMALIZE)
    ones = taken.to(tl.int32)
    pairs = tl.sum(ones, axis=0)
    first = tl.cumsum(pairs, axis=0) - pairs
    tl.store(order + first[None, :] + tl.cumsum(ones, axis=0) - ones, pair, mask=taken)
    asked = (pairs > 0).to(tl.int32)
    block = blocks + 3 * (tl.cumsum(asked, axis=0) - asked)
    tl.store(block, tl.arange(0, BLOCK_E), mask=pairs > 0)
    tl.store(block + 1, first, mask=pairs > 0)
    tl.store(block + 2, first + pairs, mask=pairs > 0)
    tl.store(count, tl.sum(asked, axis=0))


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits,
    weights,
    chosen,
    rows,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """The weight and the expert of every pair of BLOCK_R rows."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    taken, pair = _choose(logits, weights, row, rows, EXPERTS, BLOCK_E, TOP_K, NORMALIZE)
    expert = tl.arange(0, BLOCK_E)[None, :] + tl.zeros(pair.shape, tl.int32)
    tl.store(chosen + pair, expert, mask=taken)


@triton.jit(do_not_specialize=["pairs"])
def _layout_kernel(
    chosen,
    order,
    blocks,
    count,
    pairs,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One expert's part of the order, and its blocks. chosen: [pairs] experts."""
    own, each, place = tl.program_id(0), tl.arange(0, BLOCK_E), tl.arange(0, CHUNK)
    counts = tl.zeros([BLOCK_E], tl.int32)
    start = 0
    while start < pairs:  # the interpreter has no range over numbers that a kernel is given
        inside = start + place < pairs
        expert = tl.load(chosen + start + place, mask=inside, other=0)
        counts += tl.histogram(expert, BLOCK_E, mask=inside)
        start += CHUNK
    first = tl.sum(tl.where(each < own, counts, 0), axis=0)
    past = first + tl.sum(tl.where(each == own, counts, 0), axis=0)
    at, start = first, 0
    while start < pairs:
        expert = tl.load(chosen + start + place, mask=start + place < pairs, other=-1)
        mine = (expert == own).to(tl.int32)
        tl.store(order + at + tl.cumsum(mine, axis=0) - 1, start + place, mask=mine > 0)
        at += tl.sum(mine, axis=0)
        start += CHUNK
    block = tl.sum(tl.where(each < own, tl.cdiv(counts, BLOCK_M), 0), axis=0)
    while first < past:
        tl.store(blocks + 3 * block, own)
        tl.store(blocks + 3 * block + 1, first)
        tl.store(blocks + 3 * block + 2, tl.minimum(first + BLOCK_M, past))
        first += BLOCK_M
        block += 1
    if own == EXPERTS - 1:
        tl.store(count, block)

"""Pairs of rows and their experts in blocks of one expert (words as in `moe.py`)."""

from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.triton.launch import begin, overlap

CHUNKS = 512, 4096
"""Pairs that a program lays out at a time, where one such time is enough for all, and else."""


class BlockLayout(NamedTuple):
    """Where pairs lie in blocks; int32."""

    order: Tensor
    """[pairs] by expert, those of one expert by row"""
    blocks: Tensor
    """[most blocks, 3] a block's expert, its first place in `order` and the one past its last"""
    num_blocks: Tensor
    """[1]"""


@dataclass(frozen=True)
class Routing:
    """Where every pair goes, on the device."""

    weights: Tensor
    """[pairs] the router's, in the rows' type"""
    scales: Tensor | None
    """[rows] float32, what rows still have to be multiplied by; None: nothing"""
    layout: BlockLayout
    block: int
    """Most pairs in a block."""


@dataclass(frozen=True)
class ExpertSizes:
    """What kernels of experts' products are compiled with."""

    columns: int
    """Outputs of the product; where they are gates, as many of up come along."""
    depth: int
    pairs: int
    """Most pairs in a block."""
    lines: int
    """Lines of the weight that a program has."""


@dataclass(frozen=True)
class Gates:
    """What follows the product of gate and up."""

    top_k: int
    limit: float
    alpha: float
    """The slope of `clamped_swiglu`'s gate; slope and limit count where there is a bias."""
    gelu: bool
    """Whether the activation is GEGLU's, not SwiGLU's."""


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """How many blocks there are when pairs fall on experts in the worst way."""
    # in the worst way each expert that has pairs has one in a block of its own; full blocks hold
    # the rest
    begun = min(pairs, experts)
    return begun + (pairs - begun) // block


def lanes(experts: int) -> int:
    """Columns of a kernel that has one for each expert."""
    return max(32, triton.next_power_of_2(experts))


def lay_out_many(chosen: Tensor, experts: int, routing: Routing) -> None:
    """Fill a routing's order and blocks. chosen: [pairs] int32 experts."""
    (few, many), pairs = CHUNKS, len(chosen)
    _layout_kernel[(experts,)](
        chosen,
        routing.layout,
        pairs,
        BLOCK_E=lanes(experts),
        BLOCK_M=routing.block,
        CHUNK=few if pairs <= few else many,
        **overlap(chosen),
        num_warps=4 if pairs <= few else 8,
    )


@triton.jit
def lay_out_few(taken, pair, layout, BLOCK_E: tl.constexpr):
    """Store the order of [R, BLOCK_E] pairs, of which some are taken, and a block per expert."""
    expert, ones = tl.arange(0, BLOCK_E), taken.to(tl.int32)
    pairs = tl.sum(ones, axis=0)
    first = tl.cumsum(pairs, axis=0) - pairs
    tl.store(layout.order + first[None, :] + tl.cumsum(ones, axis=0) - ones, pair, mask=taken)
    asked = (pairs > 0).to(tl.int32)
    # an expert has no more pairs than there are rows, `FEW` of which fit a block
    block = layout.blocks + 3 * (tl.cumsum(asked, axis=0) - asked)
    tl.store(block, expert, mask=pairs > 0)
    tl.store(block + 1, first, mask=pairs > 0)
    tl.store(block + 2, first + pairs, mask=pairs > 0)
    tl.store(layout.num_blocks, tl.sum(asked, axis=0))


@triton.jit(do_not_specialize=["pairs"])
def _layout_kernel(
    chosen,
    layout,
    pairs,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Fill one expert's part of the order, and its blocks. chosen: [pairs] experts."""
    begin(OVERLAP)
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
        tl.store(layout.order + at + tl.cumsum(mine, axis=0) - 1, start + place, mask=mine > 0)
        at += tl.sum(mine, axis=0)
        start += CHUNK
    # its blocks begin behind those of all experts before it, which every program counts for itself
    block = tl.sum(tl.where(each < own, tl.cdiv(counts, BLOCK_M), 0), axis=0)
    while first < past:
        tl.store(layout.blocks + 3 * block, own)
        tl.store(layout.blocks + 3 * block + 1, first)
        tl.store(layout.blocks + 3 * block + 2, tl.minimum(first + BLOCK_M, past))
        first += BLOCK_M
        block += 1
    if own == tl.num_programs(0) - 1:
        tl.store(layout.num_blocks, block)


@triton.jit
def block_of(blocks, block, BLOCK_M: tl.constexpr):
    """A block's expert, its places in the order, the last one repeated, and which places are
    real."""
    expert = tl.load(blocks + 3 * block).to(tl.int64)
    place = tl.load(blocks + 3 * block + 1) + tl.arange(0, BLOCK_M)
    past = tl.load(blocks + 3 * block + 2)
    return expert, tl.minimum(place, past - 1).to(tl.int64), place < past

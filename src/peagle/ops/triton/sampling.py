"""A drawn token a row without sorting: the edges of top-k and top-p are found by a logit's bits.

One program a row. A logit's key is its own bits, turned so that keys order as logits do. The edge
of a filter is the largest key at and above which there is enough, found two bits a pass over a row;
of the tokens at an edge the first ones stay, as a stable sort would have it. One more pass finds
which of those that stay arrives first.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.sampling import Sampling
from peagle.ops.triton.argmax import argmax

BLOCK, WARPS = 8192, 32


def sample_requests(
    logits: Tensor, table: Sampling, requests: Tensor, firsts: Tensor, depths: Tensor | None = None
) -> Tensor:
    """As the reference; logits with any row stride."""
    greedy = argmax(logits)
    out = torch.empty_like(greedy)
    _sample[(len(logits),)](
        logits,
        greedy,
        table,
        requests,
        firsts,
        depths,
        out,
        len(logits) // len(requests),
        logits.shape[1],
        logits.stride(0),
        BLOCK=min(BLOCK, triton.next_power_of_2(logits.shape[1])),
        num_warps=WARPS,
    )
    return out


class Logits(NamedTuple):
    """A row within a kernel, and what its request asks for."""

    own: Any
    """Where the row's logits lie."""
    vocab: Any
    top: Any
    """The highest logit."""
    temperature: Any
    floor: Any
    """The least share that min-p leaves."""


@triton.jit(do_not_specialize=["count"])  # a prompt's end is one row, a cycle K + 1
def _sample(
    logits, greedy, table, requests, firsts, depths, out, count, vocab, stride, BLOCK: tl.constexpr
):
    # a key has as many as a logit: a number of bfloat16 has 16
    bits: tl.constexpr = 16 if logits.dtype.element_ty == tl.bfloat16 else 32
    row = tl.program_id(0).to(tl.int64)
    best = tl.load(greedy + row)
    request = tl.load(requests + row // count)
    temperature = tl.load(table.temperature + request)
    if (temperature == 0) | (best < 0):
        tl.store(out + row, best)
        return
    own = logits + row * stride
    top = tl.load(own + best).to(tl.float32)
    of_row = Logits(own, vocab, top, temperature, tl.load(table.min_p + request))
    top_k, top_p = tl.load(table.top_k + request), tl.load(table.top_p + request)
    # tokens above the edge stay, and the first `ties` of those at it
    edge = tl.zeros([], tl.uint32)
    ties = tl.zeros([], tl.float32)
    if (top_k > 0) & (top_k < vocab):
        wanted = top_k.to(tl.float32)
        edge, above = _edge(of_row, wanted, True, bits, BLOCK)
        ties = wanted - above
    if top_p < 1:
        share = _share(_value(edge, bits), of_row)
        # top-p is a part of what top-k has left
        total = _above(of_row, edge, bits, BLOCK) + ties * share
        wanted = top_p * total
        found, above = _edge(of_row, wanted, False, bits, BLOCK)
        if found >= edge:
            share = _share(_value(found, bits), of_row)
            first = tl.maximum(tl.ceil((wanted - above) / share), 1.0)
            ties = tl.where(found == edge, tl.minimum(ties, first), first)
            edge = found
    depth = row % count
    if depths is not None:
        depth = tl.load(depths + row)
    race = row_key(tl.load(table.seeds + request), tl.load(firsts + request) + depth)
    token = _first(of_row, edge, ties, race, bits, BLOCK)
    tl.store(out + row, tl.where(token < 0, best, token))


@triton.jit
def _edge(row, wanted, COUNTS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key such that keys from it on have as much as is wanted; what keys above it
    have."""
    edge = tl.zeros([], tl.uint32)
    above = tl.zeros([], tl.float32)
    step = tl.full([], 1 << (BITS - 2), tl.uint32)
    for _ in range(BITS // 2):
        # three sums at once, since each pass reads the whole row
        first = tl.zeros([BLOCK], tl.float32)
        second = tl.zeros([BLOCK], tl.float32)
        third = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, row.vocab, BLOCK):
            key, value = _read(row, begin, BITS, BLOCK)
            if COUNTS:
                value = tl.full([BLOCK], 1.0, tl.float32)
            first += tl.where(key >= edge + step, value, 0.0)
            second += tl.where(key >= edge + step * 2, value, 0.0)
            third += tl.where(key >= edge + step * 3, value, 0.0)
        one, two, three = tl.sum(first, 0), tl.sum(second, 0), tl.sum(third, 0)
        if three >= wanted:
            edge += step * 3
        elif two >= wanted:
            edge += step * 2
            above = three
        elif one >= wanted:
            edge += step
            above = two
        else:
            above = one
        step = step >> 2
    return edge, above


@triton.jit
def _above(row, edge, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of the shares above an edge."""
    total = tl.zeros([], tl.float32)
    for begin in range(0, row.vocab, BLOCK):
        key, share = _read(row, begin, BITS, BLOCK)
        total += tl.sum(tl.where(key > edge, share, 0.0), 0)
    return total


@triton.jit
def _first(row, edge, ties, race, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The token that arrives first of those that stay; -1 for none."""
    fastest = tl.zeros([], tl.float32)
    token = tl.full([], -1, tl.int32)
    for begin in range(0, row.vocab, BLOCK):
        key, shares = _read(row, begin, BITS, BLOCK)
        stays = key > edge
        if ties > 0:
            at_edge = (key == edge).to(tl.float32)
            tied = tl.sum(at_edge, 0)
            if tied > 0:
                stays = stays | ((at_edge > 0) & (tl.cumsum(at_edge, 0) <= ties))
                # blocks come in order, so the first tokens at the edge are met first
                ties -= tl.minimum(tied, ties)
        column = begin + tl.arange(0, BLOCK)
        speed = tl.where(stays, shares / arrival_time(race, column), 0.0)
        best = tl.max(speed, 0)
        if best > fastest:
            fastest = best
            token = tl.min(tl.where(speed == best, column, row.vocab), 0)
    return token


@triton.jit
def _read(row, begin, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A block's keys, 0 for what is no token, and the shares: e to the power of a scaled logit."""
    column = begin + tl.arange(0, BLOCK)
    inside = column < row.vocab
    value = tl.load(row.own + column, mask=inside, other=float("-inf")).to(tl.float32)
    share = tl.where(inside, _share(value, row), 0.0)
    return tl.where(share > 0, ordered(value, BITS), 0), share


@triton.jit
def ordered(value, BITS: tl.constexpr):
    """Keys that order as float32 numbers do, of their first bits."""
    bits = (value + 0.0).to(tl.uint32, bitcast=True)  # one zero, not two
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000) >> (32 - BITS)


@triton.jit
def _value(key, BITS: tl.constexpr):
    """The logit of a key; of key 0 none."""
    bits = key << (32 - BITS)
    # of a negative number all bits are inverted, those too that a key of 16 lacks: they were zeros
    negative = (bits ^ 0xFFFFFFFF) & (0xFFFFFFFF << (32 - BITS) & 0xFFFFFFFF)
    bits = tl.where(bits >> 31 == 1, bits & 0x7FFFFFFF, negative)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _share(value, row):
    """The share of a logit relative to that of the likeliest token; 0 below min-p."""
    share = tl.where(value == row.top, 1.0, tl.exp((value - row.top) / row.temperature))
    return tl.where(share >= row.floor, share, 0.0)


@triton.jit
def row_key(seed, position):
    """A row's key, as in the reference."""
    golden: tl.constexpr = 0x9E3779B97F4A7C15
    state = _mix(seed.to(tl.uint64, bitcast=True) + golden)
    return _mix(state + position.to(tl.uint64, bitcast=True) * golden)


@triton.jit
def arrival_time(race, tokens):
    """The reference's exponential times, except for their last bits.

    Small ones are computed by their series, since float32 does not hold 1 less a small number.
    """
    bits = _mix_short(tokens.to(tl.uint32) ^ race.to(tl.uint32))
    bits = _mix_short(bits ^ (race >> 32).to(tl.uint32)) & 0x7FFFFFFF
    share = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 2147483648), 1 - 1.0 / 16777216)
    series = share * (1.0 + share * (0.5 + share * (1.0 / 3)))
    return tl.where(share < 1.0 / 64, series, -tl.log(1.0 - share))


@triton.jit
def _mix(state):
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB
    return state ^ (state >> 31)


@triton.jit
def _mix_short(state):
    state = (state ^ (state >> 16)) * 0x7FEB352D
    state = (state ^ (state >> 15)) * 0x846CA68B
    return state ^ (state >> 16)

"""A row's likeliest tokens without sorting: those of each block, then those of all blocks, among
which a race finds the earliest.

The edge of a block's likeliest is a key, found a bit at a time in registers; of the tokens at the
edge the first ones stay. A row whose likeliest token alone is wanted takes no more than an argmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.candidates import RACED, Candidates
from peagle.ops.race import Race
from peagle.ops.triton.sampling import arrival_time, ordered, row_key

BLOCK = 4096


def likeliest(logits: Tensor, offsets: Tensor, count: int) -> Candidates:
    """As the reference; logits with any row stride."""
    count = min(count, logits.shape[1])
    return _found(logits, offsets, count, count, None)


def earliest(
    logits: Tensor, offsets: Tensor, count: int, race: Race, depth: int = 0, whole: bool = True
) -> Candidates:
    """As the reference; logits with any row stride."""
    vocab = logits.shape[1]
    counts = min(count, vocab), min(max(RACED, count), vocab)
    return _found(logits, offsets, *counts, race, depth, skips=not whole)


def _found(
    logits: Tensor,
    offsets: Tensor,
    count: int,
    raced: int,
    race: Race | None,
    depth: int = 0,
    skips: bool = False,
) -> Candidates:
    """The candidates of rows.

    count: candidates of a row; raced: how many of the likeliest drafts they are chosen from; skips:
    whether greedy rows need but one.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, parts, raced, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, parts, raced, dtype=torch.int32, device=logits.device)
    scores = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    found = Candidates(scores, *(torch.empty_like(scores, dtype=torch.int64) for _ in range(2)))
    of_request = 1 if race is None else rows // len(race.requests)
    # an edge is found a bit at a time, and a number of bfloat16 has no more
    bits = 16 if logits.dtype == torch.bfloat16 else 32
    _part[(rows, parts)](
        logits, race, best, place, of_request, vocab, logits.stride(0),
        COUNT=raced, BITS=bits, SKIPS=skips, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _merge[(rows,)](
        best, place, race, offsets, found, of_request, depth, parts,
        COUNT=count, RACED=raced, BITS=bits, SKIPS=skips,
        LANES=triton.next_power_of_2(parts * raced), num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def _is_greedy(race, row, of_request):
    """Whether a row's request is greedy."""
    return tl.load(race.sampling.temperature + tl.load(race.requests + row // of_request)) == 0


@triton.jit
def _part(
    logits,
    race,
    best,
    place,
    of_request,
    vocab,
    stride,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    SKIPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    value = tl.load(logits + row * stride + column, mask=inside, other=float("-inf"))
    value = value.to(tl.float32)
    at = (row * tl.num_programs(1) + part) * COUNT
    alone = False
    if SKIPS:
        alone = _is_greedy(race, row, of_request)
    if alone:
        broken = tl.max((value != value).to(tl.int32), 0) > 0  # then the vocabulary's first token
        top = tl.max(value, 0)
        first = tl.min(tl.where(value == top, column, vocab), 0)
        tl.store(best + at, tl.where(broken, float("inf"), top))
        tl.store(place + at, tl.where(broken, 0, first))
    else:
        stays = _highest(tl.where(inside, ordered(value, BITS), 0), COUNT, BITS)
        to = at + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(best + to, value, mask=stays)
        tl.store(place + to, tl.where(inside, column, -1), mask=stays)


@triton.jit(do_not_specialize=["depth"])
def _merge(
    best,
    place,
    race,
    offsets,
    found,
    of_request,
    depth,
    parts,
    COUNT: tl.constexpr,
    RACED: tl.constexpr,
    BITS: tl.constexpr,
    SKIPS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < parts * RACED
    alone = False
    if SKIPS:
        alone = _is_greedy(race, row, of_request)
        # a greedy row's block has one
        there = there & ((lane % RACED == 0) | (alone == 0))
    value = tl.load(best + row * parts * RACED + lane, mask=there, other=float("-inf"))
    column = tl.load(place + row * parts * RACED + lane, mask=there, other=-1)
    if alone:
        top = tl.max(value, 0)
        first = tl.min(tl.where(there & (value == top), column, 2147483647), 0)
        column = tl.zeros([LANES], tl.int32) + first
        value = tl.where(lane == 0, top, float("-inf"))
        stays, to = lane < COUNT, row * COUNT + lane
    else:
        key = tl.where(column < 0, 0, ordered(value, BITS))
        stays = _highest(key, RACED, BITS)
        if race is not None:
            request, table = tl.load(race.requests + row // of_request), race.sampling
            ahead = depth + row % of_request
            temperature = tl.load(table.temperature + request)
            heat = tl.where(temperature == 0, 1.0, temperature)
            top_k, min_p = tl.load(table.top_k + request), tl.load(table.min_p + request)
            share = (value - tl.max(value, 0)) / heat
            kept = tl.exp(share) >= tl.where(temperature == 0, 0.0, min_p)
            if (top_k > 0) & (temperature > 0):
                kept = kept & (key >= _edge(key, top_k, BITS))
            token = column + tl.load(offsets + tl.maximum(column, 0), mask=stays, other=0)
            times = row_key(
                tl.load(table.seeds + request), tl.load(race.newest + request) + 1 + ahead
            )
            arrives = value / heat - tl.log(arrival_time(times, token))
            arrives = tl.where(temperature == 0, value, arrives)
            # behind those that take part the others, the likeliest first
            behind = ordered(value, 32) >> 1
            before = (ordered(arrives, 32) >> 1) + tl.full([], 1 << 31, tl.uint32)
            key = tl.where(kept, before, behind)
            stays = _highest(tl.where(stays, key, 0), COUNT, 32)
        to = row * COUNT + tl.cumsum(stays.to(tl.int32), 0) - 1
    column = tl.maximum(column, 0)
    tl.store(found.scores + to, value, mask=stays)
    tl.store(found.ids + to, column.to(tl.int64), mask=stays)
    token = column + tl.load(offsets + column, mask=stays, other=0)
    tl.store(found.tokens + to, token, mask=stays)


@triton.jit
def _highest(key, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Which keys are the `COUNT` highest, the first ones among equals."""
    edge = _edge(key, COUNT, BITS)
    above, tied = key > edge, key == edge
    ties = COUNT - tl.sum(above.to(tl.int32), 0)
    return above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= ties))


@triton.jit
def _edge(key, count, BITS: tl.constexpr):
    """The lowest of the `count` highest keys; 0 where there are fewer."""
    edge = tl.zeros([], tl.uint32)
    step = tl.full([], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        enough = tl.sum((key >= edge + step).to(tl.int32), 0) >= count
        edge = tl.where(enough, edge + step, edge)
        step = step >> 1
    return edge

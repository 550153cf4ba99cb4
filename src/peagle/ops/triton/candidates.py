"""A row's likeliest tokens without sorting: those of each block, then those of all blocks.

The edge of a block's likeliest is a key, found a bit at a time in registers; of the tokens at the
edge the first ones stay. A row whose likeliest token alone is wanted takes no more than an argmax.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.race import Race
from peagle.ops.triton.sampling import ordered

BLOCK = 4096


def likeliest(
    logits: Tensor, offsets: Tensor, count: int, race: Race | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As the reference; logits with any row stride. Returns scores, ids and tokens."""
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty(rows, parts, count, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, parts, count, dtype=torch.int32, device=logits.device)
    scores = torch.empty(rows, count, dtype=torch.float32, device=logits.device)
    ids, tokens = (torch.empty_like(scores, dtype=torch.int64) for _ in range(2))
    sizes = {"COUNT": count, "BITS": 16 if logits.dtype == torch.bfloat16 else 32}
    if race is None:
        settings, of_request = (offsets, offsets), 1
    else:
        settings = (race.sampling.temperature, race.requests)
        of_request = rows // len(race.requests)
    skips = race is not None
    _part[(rows, parts)](
        logits, *settings, best, place, of_request, vocab, logits.stride(0),
        **sizes, SKIPS=skips, BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    _merge[(rows,)](
        best, place, *settings, offsets, scores, ids, tokens, of_request, parts,
        **sizes, SKIPS=skips, LANES=triton.next_power_of_2(parts * count), num_warps=8,
    )  # fmt: skip
    return scores, ids, tokens


@triton.jit
def _part(
    logits,
    temperatures,
    requests,
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
        alone = tl.load(temperatures + tl.load(requests + row // of_request)) == 0
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


@triton.jit
def _merge(
    best,
    place,
    temperatures,
    requests,
    offsets,
    scores,
    ids,
    tokens,
    of_request,
    parts,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    SKIPS: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < parts * COUNT
    alone = False
    if SKIPS:
        alone = tl.load(temperatures + tl.load(requests + row // of_request)) == 0
        there = there & ((lane % COUNT == 0) | (alone == 0))
    value = tl.load(best + row * parts * COUNT + lane, mask=there, other=float("-inf"))
    column = tl.load(place + row * parts * COUNT + lane, mask=there, other=-1)
    if alone:
        top = tl.max(value, 0)
        first = tl.min(tl.where(there & (value == top), column, 2147483647), 0)
        column = tl.zeros([LANES], tl.int32) + first
        value = tl.where(lane == 0, top, float("-inf"))
        stays, to = lane < COUNT, row * COUNT + lane
    else:
        stays = _highest(tl.where(column < 0, 0, ordered(value, BITS)), COUNT, BITS)
        to = row * COUNT + tl.cumsum(stays.to(tl.int32), 0) - 1
    column = tl.maximum(column, 0)
    tl.store(scores + to, value, mask=stays)
    tl.store(ids + to, column.to(tl.int64), mask=stays)
    tl.store(tokens + to, column + tl.load(offsets + column, mask=stays, other=0), mask=stays)


@triton.jit
def _highest(key, COUNT: tl.constexpr, BITS: tl.constexpr):
    """Which keys are the `COUNT` highest, the first ones among equals."""
    edge = tl.zeros([], tl.uint32)
    step = tl.full([], 1 << (BITS - 1), tl.uint32)
    for _ in range(BITS):
        enough = tl.sum((key >= edge + step).to(tl.int32), 0) >= COUNT
        edge = tl.where(enough, edge + step, edge)
        step = step >> 1
    above, tied = key > edge, key == edge
    ties = COUNT - tl.sum(above.to(tl.int32), 0)
    return above | (tied & (tl.cumsum(tied.to(tl.int32), 0) <= ties))

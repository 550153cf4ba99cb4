"""Matches of texts with themselves: a search by many programs, then a choice by one a request."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.ops.acceptance import Path
from peagle.ops.cycle_state import CycleState
from peagle.ops.draft import Found
from peagle.ops.lookup import MEMORY
from peagle.ops.triton.draft import NONE

BLOCK = 1024
"""Places that a program looks at together."""
PARTS = 8
"""Programs among which a text is divided."""
MOST_PLACES = tl.constexpr(1 << 32)
"""A match is known by its length times this, plus the place of its last token."""


def write_newest(history: Tensor, state: CycleState, requests: Tensor) -> None:
    """As the reference."""
    most, sizes = state.emitted.shape[1], (history.stride(0), history.shape[1])
    width = triton.next_power_of_2(most)
    _write_newest[(len(requests),)](history, state, requests, *sizes, most, WIDTH=width)


def look_up(
    history: Tensor, requests: Tensor, counts: Tensor, drafts: int, shortest: int, gains: Tensor
) -> Found:
    """As the reference."""
    batch, device = len(requests), history.device
    best = torch.zeros(batch, dtype=torch.int64, device=device)
    tokens = torch.empty(batch, drafts, dtype=torch.int64, device=device)
    used = torch.empty(batch, dtype=torch.bool, device=device)
    found = Found(tokens, torch.empty_like(best), used)
    _search[(batch, PARTS)](
        history, requests, counts, best, history.stride(0),
        SHORTEST=shortest, LONGEST=len(gains) - 1, BLOCK=BLOCK,
    )  # fmt: skip
    _follow[(batch,)](
        history, requests, counts, best, gains, found, history.stride(0), drafts,
        DRAFTS=triton.next_power_of_2(drafts),
    )  # fmt: skip
    return found


def weigh(gains: Tensor, found: Found, path: Path, price: float) -> None:
    """As the reference."""
    batch, count = path.drafts.shape
    _weigh[(1,)](
        gains, found, path.drafts, path.chosen, batch, count, len(gains), price,
        math.log2(math.e) / MEMORY, ROWS=triton.next_power_of_2(batch),
    )  # fmt: skip


@triton.jit
def _write_newest(history, state, requests, stride, positions, most, WIDTH: tl.constexpr):
    mine = tl.load(requests + tl.program_id(0)).to(tl.int64)
    count = tl.load(state.pending + mine)
    step = tl.arange(0, WIDTH)
    place = tl.load(state.computed + mine) + 1 - count + step
    there = (step < count) & (step < most) & (place >= 0) & (place < positions)
    token = tl.load(state.emitted + mine * most + step, mask=there, other=0)
    tl.store(history + mine * stride + place, token.to(tl.int32), mask=there)


@triton.jit
def _search(
    history,
    requests,
    counts,
    best,
    stride,
    SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index, part = tl.program_id(0), tl.program_id(1)
    mine = tl.load(requests + index).to(tl.int64)
    text = history + mine * stride
    end = tl.load(counts + index).to(tl.int32) - 1
    found = tl.zeros([BLOCK], tl.int64)
    for first in range(part * BLOCK, end, tl.num_programs(1) * BLOCK):
        place = first + tl.arange(0, BLOCK)
        alike = place < end
        length = tl.zeros([BLOCK], tl.int32)
        for step in tl.static_range(LONGEST):
            alike = alike & (place >= step)  # reads none before the text, nor where it differed
            # -1 and -2 are no tokens, and differ: nothing equals what is before a text
            last = tl.load(text + end - step, mask=end >= step, other=-1)
            token = tl.load(text + place - step, mask=alike, other=-2)
            alike = alike & (token == last)
            length += alike.to(tl.int32)
        # the largest key is the longest match, and of equally long ones the latest
        key = length.to(tl.int64) * MOST_PLACES + place
        found = tl.maximum(found, tl.where(length >= SHORTEST, key, 0))
    tl.atomic_max(best + index, tl.max(found, 0))


@triton.jit
def _follow(history, requests, counts, best, gains, found, stride, drafts, DRAFTS: tl.constexpr):
    index = tl.program_id(0)
    mine = tl.load(requests + index).to(tl.int64)
    key = tl.load(best + index)
    length, place = key // MOST_PLACES, key % MOST_PLACES
    period = tl.maximum(tl.load(counts + index) - 1 - place, 1)
    step = tl.arange(0, DRAFTS)
    wanted = step < drafts
    # a match that reaches the text's end goes on with itself
    follower = place + 1 + step % period
    token = tl.load(history + mine * stride + follower, mask=wanted & (length > 0), other=NONE)
    tl.store(found.tokens + index * drafts + step, token.to(tl.int64), mask=wanted)
    tl.store(found.lengths + index, length)
    tl.store(found.used + index, (length > 0) & (tl.load(gains + length) > 0))


@triton.jit
def _agreed(tokens, chosen, row, there, count):
    """How many of a row's tokens are the target's choices, up to the first that is not."""
    alike, agreed = there, tl.zeros_like(row)
    for place in range(count):
        token = tl.load(tokens + row * count + place, mask=alike, other=-3)
        choice = tl.load(chosen + row * (count + 1) + place, mask=alike, other=-4)
        alike = alike & (token == choice)
        agreed += alike.to(tl.int32)
    return agreed


@triton.jit
def _weigh(gains, found, drafts, chosen, batch, count, width, price, forgets, ROWS: tl.constexpr):
    row = tl.arange(0, ROWS)
    there = row < batch
    known = _agreed(drafts, chosen, row, there, count) + 1
    agreed = _agreed(found.tokens, chosen, row, there, count)
    gained = tl.minimum(agreed, known).to(tl.float32) - price
    length = tl.load(found.lengths + row, mask=there, other=-1)
    for place in range(width):
        # one length after another: several requests may have matched at one
        own = length == place
        number = tl.sum(own.to(tl.float32), 0)
        total = tl.sum(tl.where(own, gained, 0.0), 0)
        keep = tl.exp2(-number * forgets)
        fresh = (1 - keep) * total / tl.maximum(number, 1.0)
        tl.store(gains + place, tl.load(gains + place) * keep + fresh)

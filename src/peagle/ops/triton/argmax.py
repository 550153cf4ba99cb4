"""Argmax straight from the logits' own type: some programs a row, then one to merge them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
PROGRAMS = 528
"""Four on each of an H200's multiprocessors."""


def argmax(logits: Tensor, offsets: Tensor | None = None) -> Tensor:
    """As the reference; logits with any row stride."""
    rows, vocab = logits.shape
    # one warp merges a row, so parts are few
    parts = min(triton.cdiv(PROGRAMS, rows), triton.cdiv(vocab, BLOCK), 64)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    share = triton.cdiv(triton.cdiv(vocab, parts), BLOCK) * BLOCK
    _part[(rows, parts)](
        logits, best, place, vocab, logits.stride(0), share, BLOCK=BLOCK, num_warps=8
    )
    _merge[(rows,)](
        best, place, offsets, out, parts, PARTS=triton.next_power_of_2(parts), num_warps=1
    )
    return out


@triton.jit
def _part(logits, best, place, vocab, stride, share, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + part * share
    broken = tl.zeros([BLOCK], tl.int32)
    for begin in range(part * share, tl.minimum((part + 1) * share, vocab), BLOCK):
        column = begin + lane
        value = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf"))
        value = value.to(tl.float32)
        # a NaN is above nothing and nothing is above it: it must be looked for
        broken = broken | (value != value).to(tl.int32)
        higher = value > top
        where = tl.where(higher, column, where)
        top = tl.where(higher, value, top)
    highest = tl.max(top, 0)
    # each lane has the first of its own columns; of equals in several lanes the lowest counts
    first = tl.min(tl.where(top == highest, where, vocab), 0)
    at = row * tl.num_programs(1) + part
    tl.store(best + at, highest)
    tl.store(place + at, tl.where(tl.max(broken, 0) > 0, -1, first))


@triton.jit
def _merge(best, place, offsets, out, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    live = part < parts
    top = tl.load(best + row * parts + part, mask=live, other=float("-inf"))
    where = tl.load(place + row * parts + part, mask=live, other=2147483647)
    first = tl.min(tl.where(top == tl.max(top, 0), where, 2147483647), 0)
    # one part with a NaN spoils the row: -1, which no token is
    first = tl.where(tl.min(where, 0) < 0, -1, first).to(tl.int64)
    if offsets is not None:
        # a draft is some token even then, since its offset is read
        first = tl.maximum(first, 0)
        first += tl.load(offsets + first)
    tl.store(out + row, first)

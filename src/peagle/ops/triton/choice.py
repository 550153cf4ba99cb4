"""Argmax straight from the logits' own type, a program a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


def argmax(logits: Tensor) -> Tensor:
    """As the reference; logits: [rows, vocab] with any row stride."""
    out = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _argmax[(len(logits),)](
        logits, out, logits.shape[1], logits.stride(0), BLOCK=BLOCK, num_warps=16, num_stages=3
    )
    return out


@triton.jit
def _argmax(logits, out, vocab, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    broken = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        column = begin + lane
        value = tl.load(logits + row * stride + column, mask=column < vocab, other=float("-inf"))
        value = value.to(tl.float32)
        broken = broken | (value != value).to(tl.int32)
        higher = value > best
        place = tl.where(higher, column, place)
        best = tl.where(higher, value, best)
    top = tl.max(best, 0)
    first = tl.min(tl.where(best == top, place, vocab), 0)
    tl.store(out + row, tl.where(tl.max(broken, 0) > 0, -1, first).to(tl.int64))
